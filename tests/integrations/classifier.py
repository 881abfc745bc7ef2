"""A small classifier for Lightning, and its data."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Dropout(0.1), nn.Linear(8, 3))
        self.losses = []

    def training_step(self, batch, number):
        inputs, targets = batch
        loss = F.cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        inputs, targets = batch
        self.log("val_loss", F.cross_entropy(self.net(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.abs().argmax(1) % 3), batch_size=2)
