"""`shardlib run`: what it starts, where, and how it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardlib.cli import hosts, main, on_host
from shardlib.cli.usage import UsageError
from tests.house.source import ROOT

# Does what ssh does as far as `shardlib run` relies on it, and keeps what it was called with. A host called "gone"
# cannot be reached.
SSH = """#!/bin/sh
echo "$@" >> "$SSH_LOG"
while [ "${1#-}" != "$1" ]; do shift 2; done
[ "$1" = gone ] && echo "ssh: connect to host gone: no route" >&2 && exit 255
shift
exec sh -c "$*"
"""
# Joins by torchrun's own meeting place; leaves; joins again at a port of its own.
JOINS = """
import json, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from shardlib.booster import launch, launch_from_torch

def joined(job):
    total = torch.tensor(job.rank + 1)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return [job.rank, job.world_size, job.local_rank, total.item()]

folder, port, status = sys.argv[1:4]
first = launch_from_torch()
told = [joined(first), sys.argv[4:]]
if port != "0":
    told.append(joined(launch(first.rank, first.world_size, "localhost", int(port))))
file = Path(folder, f"rank{first.rank}")
file.with_suffix(".part").write_text(json.dumps(told))
file.with_suffix(".part").rename(file)
print("rank", first.rank, "is done")
while first.rank and not Path(folder, "rank0").exists():  # a rank that fails ends the others
    time.sleep(0.01)
sys.exit(int(status) if first.rank else 0)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for ssh is found first; the file in which it keeps its calls."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ssh"
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_LOG", str(tmp_path / "ssh.log"))
    return tmp_path / "ssh.log"


@pytest.fixture
def port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _shardlib_run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardlib.cli", "run", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.mark.deep  # the next one joins ranks of two hosts, and exit statuses are those of programs that fail below
def test_ranks_of_one_machine_join_and_a_failure_is_the_exit_status(tmp_path: Path, port: int):
    (tmp_path / "joins.py").write_text(JOINS)
    run = _shardlib_run("--nproc_per_node", 2, "joins.py", ".", port, 3, "--lr", "a b", "-m", cwd=tmp_path)
    for rank in (0, 1):
        told = [[rank, 2, rank, 3], ["--lr", "a b", "-m"], [rank, 2, None, 3]]
        assert json.loads((tmp_path / f"rank{rank}").read_text()) == told, run.stderr
    assert run.returncode == 1


def test_ranks_of_several_hosts_join(tmp_path: Path, ssh: Path, port: int):
    (tmp_path / "joins.py").write_text(JOINS)
    two = ["--host", "127.0.0.1,127.0.0.1", "--master_port", port, "--ssh-port", 2222, "--nproc_per_node", 1]
    run = _shardlib_run(*two, "-m", "joins", ".", 0, 0, "a b", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["127.0.0.1/0: rank 0 is done", "127.0.0.1/1: rank 1 is done"]
    assert [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)] == [
        [[rank, 2, 0, 3], ["a b"]] for rank in (0, 1)
    ]
    calls = ssh.read_text().splitlines()
    assert len(calls) == 2
    assert all(call.startswith(f"-o BatchMode=yes -p 2222 127.0.0.1 cd {tmp_path} && ") for call in calls)


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_first_failure_ends_the_others_and_is_the_status(tmp_path: Path, ssh: Path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lasting = "import os, time; open('pid', 'w').write(str(os.getpid())); os.rename('pid', 'there'); time.sleep(600)"
    failing = "import os, sys, time\nwhile not os.path.exists('there'): time.sleep(0.01)\nprint('a\\nb'); sys.exit(7)"
    begun = time.monotonic()
    assert hosts.run_on(["one", "two"], [_python(lasting), _python(failing)], None) == 7
    assert time.monotonic() - begun < 30
    assert not _is_running(int(Path("there").read_text()))
    assert capfd.readouterr() == ("two: a\ntwo: b\n", "shardlib: two ended with status 7.\n")


def test_a_host_that_ssh_does_not_reach_is_named(tmp_path: Path, ssh: Path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hosts.run_on(["gone", "two"], [_python(""), _python("input()")], None) == 255
    assert capfd.readouterr().err.splitlines()[:2] == [
        "gone: ssh: connect to host gone: no route",
        "shardlib: gone ended with status 255; if ssh itself failed, `ssh gone true` says why.",
    ]


def test_only_what_makes_a_program_run_alike_travels_and_on_no_command_line(
    tmp_path: Path, ssh: Path, capfd, monkeypatch
):
    names = ("NCCL_DEBUG", "SHARDLIB_TRANSPORT", "OMP_NUM_THREADS", "MY_TOKEN")
    for name in names:
        monkeypatch.setenv(name, "two words")
    monkeypatch.setattr(hosts, "_shell_line", _without_inherited(hosts._shell_line, names))
    assert (
        hosts.run_on(["one"], [_python(f"import os; print(*(os.getenv(name) for name in {names}), sep=', ')")], None)
        == 0
    )
    assert capfd.readouterr().out == "one: two words, two words, two words, None\n"
    assert "two words" not in ssh.read_text()


def _without_inherited(line: Callable[[list[str]], str], names: tuple[str, ...]) -> Callable[[list[str]], str]:
    """A shell that has none of these variables, as on another host."""
    return lambda command: f"unset {' '.join(names)}; {line(command)}"


@pytest.mark.parametrize("sends", [b"", b"chatter\n"])
def test_a_far_side_ends_with_its_stdin_however_it_closes(sends: bytes):
    lasting = _python("import time; print('up', flush=True); time.sleep(600)")
    far = subprocess.Popen([sys.executable, on_host.__file__, *lasting], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert far.stdin is not None
    assert far.stdout is not None
    far.stdin.write(b'{"A": "b"}\n')
    far.stdin.flush()
    assert far.stdout.readline() == b"up\n"
    far.communicate(sends, timeout=60)
    assert far.returncode == 128 + 15


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], list[list[str]]]]:
    """`started(...)` gives the hosts and the commands that `shardlib run ...` would start; for one machine no hosts."""
    kept: list[tuple[list[str], list[list[str]]]] = []

    def run_on(where: list[str], commands: list[list[str]], _port: int | None) -> int:
        kept.append((where, commands))
        return 0

    def execv(_program: str, command: list[str]) -> None:
        kept.append(([], [command]))
        raise SystemExit(0)

    monkeypatch.setattr(hosts, "run_on", run_on)
    monkeypatch.setattr(os, "execv", execv)

    def call(*arguments: str) -> tuple[list[str], list[list[str]]]:
        try:
            assert main(["run", *arguments]) == 0
        except SystemExit as end:
            assert end.code == 0
        return kept.pop()

    return call


@pytest.mark.parametrize(
    ("typed", "launched"),
    [
        ("-m mod --x 1", "--nproc_per_node=1 --standalone -m mod --x 1"),
        ("--nproc-per-node 3 -m mod", "--nproc_per_node=3 --standalone -m mod"),
        ("--master_port 5 -m mod", "--nproc_per_node=1 --master_addr=127.0.0.1 --master_port=5 -m mod"),
        ("--master_addr ::1 -m mod", "--nproc_per_node=1 --master_addr=::1 --master_port=29500 -m mod"),
        ("--host localhost -m mod", "--nproc_per_node=1 --standalone -m mod"),
        (
            "--extra_launch_args max_restarts=2,--no-python,rdzv_backend=c10d -m mod",
            "--nproc_per_node=1 --max_restarts=2 --no-python --rdzv_backend=c10d -m mod",
        ),
    ],
)
def test_one_machine_becomes_torchrun(started, monkeypatch, typed: str, launched: str):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert started(*typed.split()) == ([], [[*TORCHRUN, *launched.split()]])


def test_a_rank_for_each_accelerator_unless_told(started, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert started("-m", "mod")[1][0][3] == "--nproc_per_node=4"


def test_nodes_are_numbered_in_the_order_of_hosts(started):
    where, commands = started("--host", "me@a, b", "--nproc_per_node", "2", "train.py", "--lr", "1")
    assert where == ["me@a", "b"]
    launched = "--nproc_per_node=2 --nnodes=2 --node_rank={} --master_addr=a --master_port=29500 train.py --lr 1"
    assert commands == [[*TORCHRUN, *launched.format(node).split()] for node in (0, 1)]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([], ["a", "b", "c"]),
        (["--include", "c,a"], ["a", "c"]),
        (["--exclude", "b"], ["a", "c"]),
        (["--num_nodes", "2"], ["a", "b"]),
        (["--exclude", "a", "--num_nodes", "1"], ["b"]),
    ],
)
def test_hosts_come_from_a_file(started, tmp_path: Path, chosen: list[str], expected: list[str]):
    (tmp_path / "hosts").write_text("# ours\na\n\nb  # the slow one\nc\n")
    assert started("--hostfile", str(tmp_path / "hosts"), *chosen, "-m", "mod")[0] == expected


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("none.py", f'There is no script "none.py" (looked for from {Path.cwd()}).'),
        ("--host a --hostfile f s.py", "Give the hosts once: with --host or with --hostfile, not both."),
        ("--host -oProxyCommand=x s.py", None),
        ("--host=-oX,b s.py", '--host names "-oX", which is not a host; give names or addresses, separated by commas.'),
        ("--hostfile none s.py", 'The hostfile "none" cannot be read: No such file or directory.'),
        (
            "--host a --include a s.py",
            "--include and --exclude choose from the hosts of a --hostfile; give one, or --host alone.",
        ),
        ("--hostfile f --include a --exclude b s.py", "Give --include or --exclude, not both."),
        ("--hostfile HOSTS --include nod s.py", '--include names "nod"; the hostfile has node. Did you mean "node"?'),
        (
            "--hostfile HOSTS --exclude node s.py",
            "No host is left to run on; look at --host, --hostfile and --exclude.",
        ),
        (
            "--num_nodes 2 s.py",
            "--num_nodes 2 was given, and 0 hosts; give --host or --hostfile for more.",
        ),
        (
            "--extra_launch_args nnodes=2 -m mod",
            '--extra_launch_args names "nnodes"; --num_nodes, --host or --hostfile says it here.',
        ),
        ("--nproc_per_node 0 s.py", None),
        ("--master_port 70000 s.py", None),
        ("--hostfil f s.py", None),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, capsys, typed: str, message: str | None):
    (tmp_path / "hosts").write_text("node\n")
    arguments = [word.replace("HOSTS", str(tmp_path / "hosts")) for word in typed.split()]
    if message is None:  # argparse says it
        with pytest.raises(SystemExit, match="2"):
            main(["run", *arguments])
    else:
        assert main(["run", *arguments]) == 2
        assert capsys.readouterr().err == f"shardlib: {message}\n"


def test_a_hostfile_with_more_than_names_is_refused(tmp_path: Path, capsys):
    (tmp_path / "hosts").write_text("a\nb slots=4\n")
    assert main(["run", "--hostfile", str(tmp_path / "hosts"), "s.py"]) == 2
    assert capsys.readouterr().err == (
        f'shardlib: "{tmp_path / "hosts"}", line 2: "b slots=4"; give one host on each line and nothing else. How many '
        "processes run on each is said by --nproc_per_node.\n"
    )


def test_a_hostfile_with_a_byte_order_mark(started, tmp_path: Path):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert started("--hostfile", str(tmp_path / "hosts"), "-m", "mod")[0] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a\nb\xff\n", "is not UTF-8 text (line 2); save it as UTF-8."),
        (b"a\x1b[2J\n", 'names "a\\x1b[2J", which is not a host; give names or addresses, separated by commas.'),
    ],
)
def test_a_hostfile_that_is_not_text_is_refused(tmp_path: Path, capsys, content: bytes, told: str):
    (tmp_path / "hosts").write_bytes(content)
    assert main(["run", "--hostfile", str(tmp_path / "hosts"), "s.py"]) == 2
    assert capsys.readouterr().err.endswith(f"{told}\n")


def test_a_machine_without_ssh_is_told(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="There is no ssh on this machine"):
        hosts.run_on(["a", "b"], [["true"], ["true"]], None)
