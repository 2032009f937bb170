"""Models that no one here wrote: the ledger adds up, and the plan is right to the byte."""

import pytest
import torch
import torchvision
from torch.nn.functional import cross_entropy

from labsupport.measure import MemoryLedger
from labsupport.train import Recipe, Workload, build_step, plan_memory

SIDES = {
    "alexnet": 96,
    "convnext_tiny": 64,
    "efficientnet_b0": 64,
    "googlenet": 64,
    "mnasnet0_5": 64,
    "mobilenet_v3_small": 64,
    "regnet_y_400mf": 64,  # its constructor reads tensors
    "resnext50_32x4d": 64,
    "shufflenet_v2_x0_5": 64,
    "squeezenet1_1": 64,
    "swin_t": 64,
    "vgg11_bn": 64,
    "vit_b_16": 224,  # on meta tensors another attention kernel would be chosen
}


def classify(model, batch):
    out = model(batch[0])
    return cross_entropy(getattr(out, "logits", out), batch[1])


def assert_planned(workload, batches=(2, 5)):
    plan = plan_memory(workload)
    for batch in batches:
        step = build_step(workload, Recipe(batch_size=batch), "cpu")
        with MemoryLedger(step.model, step.optimizer, inputs=step.batch) as ledger:
            step()
            step()
        assert sum(ledger.at_peak().values()) == ledger.peak_bytes
        assert ledger.at_end()["parameter"] == sum(p.nbytes for p in step.model.parameters())
        assert plan.at_peak(batch) == ledger.at_peak()


@pytest.mark.slow
@pytest.mark.parametrize("name", SIDES)
def test_torchvision(name):
    options = {"init_weights": False} if name == "googlenet" else {}
    side = SIDES[name]
    assert_planned(
        Workload(
            name,
            lambda: getattr(torchvision.models, name)(num_classes=10, **options),
            lambda n, device: (torch.randn(n, 3, side, side, device=device), torch.randint(10, (n,), device=device)),
            classify,
            torch.optim.AdamW,
        )
    )


SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
WORDS = 500


def gpt2(transformers):  # its head is tied to its embedding
    config = transformers.GPT2Config(vocab_size=WORDS, n_layer=2, n_embd=64, n_head=4, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


TRANSFORMERS = {
    "GPT-2": gpt2,
    "BERT": lambda transformers: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS, **SMALL)),
    "Llama": lambda transformers: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **SMALL)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_language_models(name):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'test'")
    assert_planned(
        Workload(
            name,
            lambda: TRANSFORMERS[name](transformers),
            lambda n, device: torch.randint(WORDS, (n, 24), device=device),
            lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
            torch.optim.AdamW,
        )
    )


@pytest.mark.slow
def test_a_vision_transformer_of_transformers():
    transformers = pytest.importorskip("transformers", reason="needs the extra 'test'")
    config = transformers.ViTConfig(image_size=64, patch_size=16, **SMALL)
    assert_planned(
        Workload(
            "ViT",
            lambda: transformers.ViTForImageClassification(config),
            lambda n, device: (torch.randn(n, 3, 64, 64, device=device), torch.randint(2, (n,), device=device)),
            lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss,
            torch.optim.AdamW,
        )
    )
