"""Scripts of the older kind, as ColossalAI's users have them: nothing but the import lines is ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.booster.script import NET_AND_IMAGES
from tests.main_on_ranks import run_script

IMPORTS = """
import shardlib.trainer as colossalai
from shardlib.trainer import AMP_TYPE
from shardlib.trainer import Accuracy, MultiTimer, Trainer, get_dataloader, get_dist_logger, hooks
from shardlib.trainer import global_context as gpc
from shardlib.trainer import BaseGradientHandler, GRADIENT_HANDLER, ParallelMode
from shardlib.trainer import load_checkpoint, save_checkpoint
"""

CONFIG = """
BATCH_SIZE = 8
NUM_EPOCHS = 3
LEARNING_RATE = 0.1

parallel = dict(pipeline=1, tensor=dict(size=1, mode=None))
gradient_accumulation = 2
clip_grad_norm = 5.0
gradient_handler = [dict(type="MyGradientHandler")]
cudnn_benchmark = False
"""

SCRIPT = """
import os

import torch
import torch.nn as nn


@GRADIENT_HANDLER.register_module
class MyGradientHandler(BaseGradientHandler):
    steps = 0

    def handle_gradient(self):
        MyGradientHandler.steps += 1


# what is trained


def build():
    model = Net()
    train_dataloader = get_dataloader(
        dataset=images(), shuffle=True, batch_size=gpc.config.BATCH_SIZE, num_workers=0, pin_memory=False
    )
    test_dataloader = get_dataloader(dataset=images(), add_sampler=False, batch_size=gpc.config.BATCH_SIZE)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=gpc.config.LEARNING_RATE, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[20], gamma=0.5)
    return model, optimizer, criterion, train_dataloader, test_dataloader, lr_scheduler


def main():
    parser = colossalai.get_default_parser()
    parser.add_argument("--from_torch", default=False, action="store_true")
    parser.add_argument("--checkpoint")
    args = parser.parse_args()
    colossalai.launch_from_torch(args.config)
    logger = get_dist_logger()
    logger.info(f"built with batches of {gpc.config.BATCH_SIZE}", ranks=[0])

    # a loop of one's own
    engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(*build())
    data_ranks = gpc.get_world_size(ParallelMode.DATA)
    assert len(train_dataloader) == 8 // data_ranks
    engine.train()
    for epoch in range(gpc.config.NUM_EPOCHS):
        train_dataloader.sampler.set_epoch(epoch)
        for img, label in train_dataloader:
            engine.zero_grad()
            output = engine(img)
            train_loss = engine.criterion(output, label)
            engine.backward(train_loss)
            engine.step()
            lr_scheduler.step()
    assert MyGradientHandler.steps == lr_scheduler.last_epoch == 12 // data_ranks
    save_checkpoint(f"{args.checkpoint}.pt", epoch, engine.model, engine.optimizer, lr_scheduler)
    with torch.no_grad():
        engine.model.classifier.weight.zero_()
    assert load_checkpoint(f"{args.checkpoint}.pt", engine.model, engine.optimizer, lr_scheduler) == epoch
    engine.eval()
    correct, total = 0, 0
    for img, label in test_dataloader:
        with torch.no_grad():
            correct += int((engine(img).argmax(-1) == label).sum())
        total += len(label)
    assert total == 64 and correct / total > 0.9, correct
    assert sorted(engine.model.state_dict()) == sorted(Net().state_dict())

    # a trainer, twice: the second goes on where the first ends
    for epochs in (2, gpc.config.NUM_EPOCHS):
        torch.manual_seed(0)
        engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(*build(), verbose=False)
        timer = MultiTimer()
        trainer = Trainer(engine=engine, timer=timer, logger=logger)
        hook_list = [
            hooks.LossHook(),
            hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=False),
            hooks.AccuracyHook(accuracy_func=Accuracy()),
            hooks.LogMetricByEpochHook(logger),
            hooks.LogMemoryByEpochHook(logger),
            hooks.LogTimingByEpochHook(timer, logger),
            hooks.ThroughputHook(),
            hooks.SaveCheckpointHook(interval=1, checkpoint_dir=args.checkpoint, model=engine.model, resume=True),
        ]
        trainer.fit(
            train_dataloader=train_dataloader,
            epochs=epochs,
            test_dataloader=test_dataloader,
            test_interval=1,
            hooks=hook_list,
            display_progress=True,
        )
        assert trainer.cur_epoch == epochs and trainer.cur_step == epochs * len(train_dataloader)
    accuracy = trainer.states["metrics"]["test"]["Accuracy"].get_accumulated_value()
    assert accuracy > 0.9, accuracy
    if gpc.get_global_rank() == 0:
        print(f"accuracy {accuracy:.2f}, {len(os.listdir(args.checkpoint))} checkpoints")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
"""

PLANS = {
    "config.py": CONFIG,
    "naive.py": CONFIG
    + "\nfrom shardlib.trainer import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**5)\n",
}


@pytest.mark.parametrize("config", ["config.py", pytest.param("naive.py", marks=pytest.mark.deep)])
def test_a_script_of_the_older_kind_runs_with_only_its_imports_changed(tmp_path: Path, config: str):
    script = tmp_path / "train.py"
    script.write_text(IMPORTS + SCRIPT.replace("# what is trained", NET_AND_IMAGES))
    (tmp_path / config).write_text(PLANS[config])
    options = ["--from_torch", "--config", str(tmp_path / config), "--checkpoint", str(tmp_path / "checkpoints")]
    printed = run_script(script, *options, processes=2)
    assert printed.out.count("accuracy ") == 1 and "3 checkpoints" in printed.out
    lines = [line for line in printed.err.splitlines() if "/ Test]: Loss = " in line]
    assert len(lines) == 3 and all("rank 0 of 2" in line and "Accuracy = " in line for line in lines)
