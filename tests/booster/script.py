"""What scripts as users have them are written around."""

NET_AND_IMAGES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(8 * 4 * 4, 4)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def images():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(64) % 4
    x = 0.1 * torch.randn(64, 1, 8, 8, generator=generator)
    for i, label in enumerate(labels):
        x[i, 0, 2 * int(label) : 2 * int(label) + 2] += 1
    return torch.utils.data.TensorDataset(x, labels)
"""
