"""Loops of other people's frameworks: accused of nothing as they are meant, and of the fault where it is planted."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from labsupport.diagnose import audit

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("pytorch_lightning")
transformers = pytest.importorskip("transformers")

ROWS, BATCH, WINDOW = 44, 4, 4  # eleven batches: the last window has three


@pytest.fixture(autouse=True)
def quietly():
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def rows():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 8), torch.randn(ROWS, 1))


def accused_of(report):
    assert report.backwards and report.steps, report
    return set(report.names)


# Accelerate.


def accelerated(*, zero_first=False, schedule_each=False, clip=True, epochs=2, precision="no"):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, mixed_precision=precision)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    plain = scheduler
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(rows(), BATCH, shuffle=True), scheduler
    )

    def train():
        for _ in range(epochs):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(x), y)
                    if zero_first and accelerator.sync_gradients:
                        optimizer.zero_grad()
                    accelerator.backward(loss)
                    if clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    (plain if schedule_each else scheduler).step()
                    if not zero_first:
                        optimizer.zero_grad()

    return train


@pytest.mark.parametrize("precision", ("no", "bf16"))
def test_accelerate_as_it_is_meant(precision):
    report = audit(loop=accelerated(precision=precision))
    assert accused_of(report) == set() and report.steps == 2 * 3


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"zero_first": True}, "gradients cleared inside the window"),
        ({"schedule_each": True}, "scheduler inside the window"),
    ],
)
def test_accelerate_with_a_fault(wrong, name):
    assert accused_of(audit(loop=accelerated(**wrong))) == {name}


# Lightning.


class Automatic(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, _):
        loss = F.mse_loss(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Automatic):
    """Two networks against each other; `pile`: the critic's gradients are never cleared."""

    def __init__(self, pile=False):
        super().__init__()
        self.critic, self.pile, self.automatic_optimization = net(), pile, False

    def training_step(self, batch, _):
        of_maker, of_critic = self.optimizers()
        made = self.net(batch[0])
        fake = batch[0] + made
        self.toggle_optimizer(of_critic)
        self.manual_backward(F.softplus(self.critic(fake.detach()) - self.critic(batch[0])).mean())
        of_critic.step()
        if not self.pile:
            of_critic.zero_grad()
        self.untoggle_optimizer(of_critic)
        of_maker.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        of_maker.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), 1e-3), torch.optim.SGD(self.critic.parameters(), 1e-3)


class Undetached(Automatic):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.losses.append(loss)
        return loss


def fitting(module, tmp_path, **options):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )
    loader = DataLoader(rows(), BATCH)
    return lambda: trainer.fit(module, loader)


@pytest.mark.parametrize("precision", ("32-true", "bf16-mixed"))
def test_lightning_automatic(tmp_path, precision):
    module = Automatic()
    before = [p.clone() for p in module.parameters()]
    options = {"accumulate_grad_batches": WINDOW, "gradient_clip_val": 0.1, "precision": precision}
    report = audit(loop=fitting(module, tmp_path, **options))
    assert accused_of(report) == set() and (report.backwards, report.steps) == (22, 6)
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_lightning_manual(tmp_path):
    report = audit(loop=fitting(Manual(), tmp_path))
    assert accused_of(report) == set() and report.steps == 44


def test_lightning_with_a_fault(tmp_path):
    assert accused_of(audit(loop=fitting(Manual(pile=True), tmp_path))) == {"gradients pile up"}
    assert accused_of(audit(loop=fitting(Undetached(), tmp_path))) == {"graphs kept"}


# Transformers.


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        length = 3 + row % 6
        tokens = torch.randint(0, 60, (8,), generator=torch.Generator().manual_seed(row))
        labels = torch.where(torch.arange(8) < length, tokens, -100)  # micro-batches with unlike numbers of tokens
        return {"input_ids": tokens, "labels": labels}


def trainer_of(tmp_path, model=None, **options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    model = model or transformers.GPT2LMHeadModel(config)
    return transformers.Trainer(model=model, args=arguments, train_dataset=Tokens())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": WINDOW},
        {"gradient_accumulation_steps": WINDOW, "bf16": True, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_trainer_of_transformers(tmp_path, options):
    accelerate.state.AcceleratorState._reset_state(True)
    trainer = trainer_of(tmp_path, **options)
    before = [p.clone() for p in trainer.model.parameters()]
    report = audit(loop=trainer.train)
    assert accused_of(report) == set(), report
    assert report.backwards == 22 and report.steps == (6 if options else 22)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_the_trainer_with_a_fault(tmp_path):
    accelerate.state.AcceleratorState._reset_state(True)
    trainer = trainer_of(tmp_path)
    trainer.model.transformer.h[0].register_forward_hook(lambda *a: a[-1].detach())
    assert accused_of(audit(loop=trainer.train)) == {"parameters without gradient"}
