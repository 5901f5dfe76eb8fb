"""The judge's training: what it minimises, that it stops and goes on, and what it leaves behind."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from judges import build, draw_lora, processor_of_any_size
from runs import train_judge
from safetensors.torch import load_file
from tiny_runs import metrics as lines
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, TrainerCallback

from pacorl.config.base import ConfigError, load
from pacorl.core.objectives.decision_weighted import decision_weighted
from pacorl.io.images import open_image
from pacorl.io.processor import load_processor
from pacorl.judge.local import LocalJudge
from pacorl.judge_training.examples import Collator, in_both_orders, load_data, rows_of
from pacorl.judge_training.held_out import HeldOut
from pacorl.judge_training.judge_config import JudgeConfig, RewardTuningConfig
from pacorl.judge_training.judge_trainer import JudgeTrainer, build_trainer, checkpoints
from pacorl.judge_training.loop import (
    DIGESTS,
    LABEL_KEYS,
    WeightedLikelihoodTrainer,
    micro_batches,
    read_answers,
    training_arguments,
)
from pacorl.judge_training.tuning import load_model, processor_of, save_processor, source_of, tune
from pacorl.records.comparisons import comparisons_from, save_comparisons
from pacorl.runtime.stopping import Interrupted
from pacorl.types import Question

RECIPE = Path(__file__).parents[2] / "configs" / "reward" / "tiny.yaml"
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve comparisons; the file that holds them."""
    folder = tmp_path_factory.mktemp("data")
    comparisons_from("tiny:train:12", scratch=folder)
    return folder / "tiny-train-12" / "comparisons.jsonl"


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Any:
    """Overrides → a config of six steps of two comparisons."""

    def config(*overrides: str, out: str = "run") -> JudgeConfig:
        small = [
            f"out={tmp_path / out}",
            f"data.train=['{data}']",
            "data.evaluation=[]",
            "optimizer.batch=2",
            "log_every=2",
            "save_every=100",
            "trackers=[]",
        ]
        return load(JudgeConfig, RECIPE, [*small, *overrides])

    return config


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


# --- the forward -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(data: Path) -> dict[str, torch.Tensor]:
    rows = rows_of(comparisons_from(str(data)))
    return Collator(processor_of("tiny"), target="reasons")(rows[:4])


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("tiny", dtype="float32")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_every_family_learns_on_answers_alone(family: str, data: Path) -> None:
    """Loss and gradients of an adapter, in recurrent layers too, are those of full logits, in double precision."""
    processor = processor_of_any_size()
    rows = rows_of(comparisons_from(str(data)))
    batch = Collator(processor, target="reasons")([rows[0], rows[1]])
    tuned = tune(build(family, processor).double(), RewardTuningConfig(rank=2))
    inputs = {name: tensor for name, tensor in batch.items() if name not in LABEL_KEYS}
    logits = tuned(**inputs).logits[:, :-1].log_softmax(-1)
    every = F.pad(logits.gather(2, batch["input_ids"][:, 1:, None])[..., 0], (1, 0))
    few = read_answers(tuned, batch, yes=0, no=1)[0]
    losses = [decision_weighted(found, batch["answer"], alpha=0.1) for found in (every, few)]
    learned = {name: parameter for name, parameter in tuned.named_parameters() if "lora_B" in name}
    assert any("linear_attn.in_proj_qkv" in name for name in learned) == (family == "qwen3_5")
    learning = list(learned.values())
    one, other = (torch.cat([g.flatten() for g in torch.autograd.grad(loss, learning)]) for loss in losses)
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-10)
    assert one.norm() > 0
    torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


def test_p_yes_is_the_judges(data: Path, model: Any) -> None:
    """What training sees is what scoring asks, images within the question included."""
    comparisons = comparisons_from(str(data))[:3]
    judge = LocalJudge(model, processor_of("tiny"))
    judge.processor.tokenizer.pad_token = "<|im_end|>"  # as of some checkpoints: what pads also ends turns
    rows = in_both_orders(comparisons)
    collator = Collator(judge.processor, target="reasons")
    _, p_yes_B = read_answers(model, collator(rows), yes=collator.yes, no=collator.no)
    asked = [Question(tuple(map(open_image, row.images)), row.question) for _, row in rows]
    assert len(asked) == 6
    assert p_yes_B.tolist() == pytest.approx([v.p_yes for v in judge.verdicts(asked)], abs=1e-5)


def test_image_tags_stand_where_the_question_puts_them(data: Path) -> None:
    collator = Collator(processor_of("tiny"), target="reasons")
    one = dataclasses.replace(comparisons_from(str(data))[0], question="<image> or <image>?")
    text = collator.processor.tokenizer.decode(collator.prompt_ids(one, [1, 1]))
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"user\n{image} or {image}?<|im_end|>" in text


def test_targets(data: Path) -> None:
    yes, no = comparisons_from(str(data))[:2]
    processor = processor_of("tiny")
    decode = processor.tokenizer.decode
    found = {target: Collator(processor, target=target) for target in ("reasons", "label")}
    assert decode(found["reasons"].answer_ids(no)) == f"No. {no.reasons}<|im_end|>"
    assert decode(found["label"].answer_ids(yes)) == "Yes.<|im_end|>"
    assert decode(found["reasons"].answer_ids(dataclasses.replace(yes, answer="Yes! All."))) == "Yes! All.<|im_end|>"
    with pytest.raises(ValueError, match="does not begin with the token of 'No'"):
        found["reasons"].answer_ids(dataclasses.replace(no, answer=" No."))


# --- batches ---------------------------------------------------------------------------------------------------


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.steps.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))


def gradients(config: JudgeConfig) -> list[torch.Tensor]:
    arguments, seen = training_arguments(config, evaluates=False), Gradients()
    trainer = build_trainer(config, load_data(config), HeldOut([], config.out), arguments, callbacks=[seen])
    trainer.train()
    return seen.steps


def test_a_last_step_that_is_not_full_is_a_mean_too(run: Any, data: Path) -> None:
    """Three comparisons as 2 + 1: the mean over three, not the mean of two means."""
    three = comparisons_from(str(data))[:3]
    save_comparisons(three, data.with_name("three.jsonl"))
    source = [f"data.train=['{data.with_name('three.jsonl')}']", "optimizer.batch=4", "optimizer.max_grad_norm=0"]
    (whole,) = gradients(run(*source, "optimizer.micro_batch=4", out="whole"))
    (parts,) = gradients(run(*source, "optimizer.micro_batch=2", out="parts"))
    assert (whole - parts).norm() < 1e-5 * whole.norm()


def test_a_batch_is_dealt_to_processes_and_forwards(run: Any) -> None:
    config = run("optimizer.batch=24", "optimizer.micro_batch=8")
    assert [micro_batches(config, world=world) for world in (1, 2, 4, 8)] == [(8, 3), (6, 2), (6, 1), (3, 1)]
    with pytest.raises(ValueError, match=r"optimizer\.batch 24 cannot be shared by 5 processes"):
        micro_batches(config, world=5)


# --- runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(
    run: Any, data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint between two lines of the log, and newer ones that were cut short or damaged."""
    more = ["data.evaluation=[tiny:dev:2]", "evaluate_every=4"]
    whole, stopped = run(*more, out="whole"), run(*more, out="stopped")
    JudgeTrainer(whole).train()
    loss = WeightedLikelihoodTrainer.compute_loss

    def loss_and_signal(trainer: WeightedLikelihoodTrainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(WeightedLikelihoodTrainer, "compute_loss", loss_and_signal)
        with pytest.raises(Interrupted, match="stopped after step 3, and saved; go on with --resume"):
            JudgeTrainer(stopped).train()
    (checkpoint,) = checkpoints(stopped.out / "checkpoints")
    assert checkpoint.name == "checkpoint-3"
    for torn in (checkpoint.with_name("checkpoint-4"), checkpoint.with_name("checkpoint-5")):
        shutil.copytree(checkpoint, torn)
        (torn / "adapter_model.safetensors").write_bytes(b"cut short")
    (torn / DIGESTS).unlink()
    with (stopped.out / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "train", "epoch": 0, "step": 5, "loss": 0}\n{"kind": "tr')
    with pytest.raises(ValueError, match=r"is there already.* go on with --resume"):
        JudgeTrainer(stopped).train()
    with pytest.raises(ValueError, match=r"optimizer.lr was .* and is now 0.5: .* by tuning.start"):
        JudgeTrainer(run(*more, "optimizer.lr=0.5", out="stopped"), resume=True)
    trainer = JudgeTrainer(run(*more, "data.evaluation_limit=9", out="stopped"), resume=True)
    trainer.train()
    assert "resumed with another setting: data.evaluation_limit was 512 and is now 9" in caplog.text
    assert "checkpoint-4/adapter_model.safetensors is damaged" in caplog.text
    # The stop is a line of its own, so the next one is a mean over what follows it.
    found = lines(stopped.out)
    assert [line["step"] for line in found] == [0, 2, 3, 4, 4, 6, 6]
    del found[2]
    uninterrupted = lines(whole.out)
    assert [line["step"] for line in uninterrupted] == [0, 2, 4, 4, 6, 6]
    assert found[:2] + found[3:] == uninterrupted[:2] + uninterrupted[3:]
    expected, resumed = weights(whole.out), weights(stopped.out)
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    assert any(value.abs().sum() > 0 for name, value in resumed.items() if "lora_B" in name)


def test_evaluation_is_logged_and_summarised(run: Any, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run(f"data.evaluation=['{data}', 'tiny:dev:2']", "max_steps=1")
    JudgeTrainer(config).train()
    first, train, last = lines(config.out)
    assert (first["kind"], train["kind"], last["kind"]) == ("evaluation", "train", "evaluation")
    assert {"decision_accuracy", "auc", "ece", "order_gap"} <= set(first)
    summary = json.loads((config.out / "summary.json").read_text())
    assert summary["before"]["auc"]["mean"] == first["auc"]
    assert summary["after"]["auc"]["mean"] == last["auc"]
    assert not {"kind", "epoch", "step", "seconds/evaluation"} & {*summary["before"], *summary["after"]}
    assert summary["steps"] == last["step"] == 1
    # Stopped after its last step, which is within an epoch.
    weights = (config.out / "adapter" / "adapter_model.safetensors").read_bytes()
    JudgeTrainer(config, resume=True).train()
    assert lines(config.out)[-1]["step"] == 1
    assert (config.out / "adapter" / "adapter_model.safetensors").read_bytes() == weights
    count = len(comparisons_from(str(data)))
    assert summary["held_out_pairs"] == 2
    assert f"{count} of {count + 2} evaluation pairs are trained on, and left out" in caplog.text


@pytest.mark.slow
def test_merged_weights_judge_as_the_adapter_does(run: Any, data: Path) -> None:
    config = run("merge=true", "max_steps=2", "optimizer.warmup=0", "optimizer.lr=0.1")
    JudgeTrainer(config).train()
    merged = config.out / "merged"
    one = comparisons_from(str(data))[0]
    asked = [Question(tuple(map(open_image, one.images)), one.question)]
    base, adapted, whole = (
        LocalJudge.from_pretrained(source).verdicts(asked)[0].p_yes
        for source in ("tiny", config.out / "adapter", merged)
    )
    assert whole == pytest.approx(adapted, abs=1e-5)
    assert whole != pytest.approx(base, abs=1e-3)  # or nothing was merged
    for name, key in (
        ("preprocessor_config", "image_processor_type"),
        ("video_preprocessor_config", "video_processor_type"),
    ):
        document = json.loads((merged / f"{name}.json").read_text())
        assert document["processor_class"] == "Qwen2_5_VLProcessor"
        assert document[key].startswith("Qwen2VL")
        assert (document["patch_size"], document["merge_size"]) == (8, 2)
    assert "ImageTextProcessor" not in (merged / "tokenizer_config.json").read_text()
    stock = AutoModelForImageTextToText.from_pretrained(merged)
    assert type(stock).__name__ == "Qwen2_5_VLForConditionalGeneration"


def test_merged_weights_keep_the_template_that_was_trained_with(tmp_path: Path) -> None:
    """A processor's own template may differ from its tokenizer's."""
    processor = processor_of("tiny")
    processor.chat_template = processor.chat_template.replace("helpful assistant", "judge")
    save_processor(processor, tmp_path, source=source_of("tiny"))
    assert "You are a judge." in load_processor(tmp_path).chat_template
    assert "You are a judge." not in processor.tokenizer.chat_template


@pytest.mark.slow
def test_two_processes_train_as_one(data: Path, tmp_path: Path) -> None:
    """Losses and gradient norms of a batch of four, in one process and dealt to two by DDP."""
    settings = [f"data.train=['{data}']", "data.evaluation=[]", "optimizer.batch=4", "log_every=1", "trackers=[]"]
    for world in (1, 2):
        worlds.run(train_judge, [*settings, f"out={tmp_path / str(world)}"], world=world)
    one, other = (lines(tmp_path / str(world)) for world in (1, 2))
    assert [line["step"] for line in one] == [line["step"] for line in other] == [1, 2, 3]
    for name in ("loss", "grad_norm", "decision_accuracy"):
        assert [line[name] for line in other] == pytest.approx([line[name] for line in one], rel=1e-4), name


def test_what_is_trained(model: Any) -> None:
    tuned = tune(load_model("tiny", dtype="float32"), RewardTuningConfig())
    adapter = {name for name, parameter in tuned.named_parameters() if parameter.requires_grad}
    linear = [
        name for name, module in model.model.language_model.named_modules() if isinstance(module, torch.nn.Linear)
    ]
    assert len(adapter) == 2 * len(linear) == 2 * 7 * 4
    assert all("language_model" in name and "lora_" in name for name in adapter)


@pytest.mark.slow
def test_an_adapter_may_be_the_start(tmp_path: Path) -> None:
    first = draw_lora(tune(load_model("tiny", dtype="float32"), RewardTuningConfig(rank=4, alpha=8)))
    first.save_pretrained(tmp_path)
    start = RewardTuningConfig(rank=4, alpha=8, start=str(tmp_path))
    second = tune(load_model("tiny", dtype="float32"), start)
    trained = {name: parameter for name, parameter in first.named_parameters() if parameter.requires_grad}
    found = {name: parameter for name, parameter in second.named_parameters() if parameter.requires_grad}
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], value) for name, value in trained.items())
    with pytest.raises(ValueError, match=r"rank 4, alpha 8.*rank 8"):
        tune(load_model("tiny", dtype="float32"), start.model_copy(update={"rank": 8}))


@pytest.mark.parametrize(
    ("override", "message"),
    [("loss.alpha=1.5", r"loss\.alpha"), ("loss.alpha=0", r"loss\.alpha"), ("data.train=[]", r"data\.train")],
)
def test_a_config_that_makes_no_sense_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(JudgeConfig, None, [override])


def test_the_limited_evaluation_is_spread_over_its_file(run: Any, data: Path) -> None:
    """Files are often in the order of their categories."""
    held_out = load_data(run("data.evaluation=['tiny:dev:12']", "data.evaluation_limit=4")).evaluation
    whole = load_data(run("data.evaluation=['tiny:dev:12']")).evaluation
    assert [whole.index(pair) // 3 for pair in held_out] == [0, 1, 2, 3]


def test_rows_have_their_images_in_order(data: Path) -> None:
    (_, straight), (_, swapped) = in_both_orders(comparisons_from(str(data))[:1])
    assert straight.images == swapped.images[::-1]
