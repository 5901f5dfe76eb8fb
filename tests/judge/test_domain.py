"""The domain of the committed tiny judge: what it declines, at which doors, and where it is never asked."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from research.tiny.pretrain_domain import random_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from pacorl.bench.benchmarks import BenchmarkOptions
from pacorl.bench.running import opened_judge
from pacorl.core import questions
from pacorl.core.grid import split
from pacorl.io.images import ImageError
from pacorl.judge.domain import SETTINGS_FILE, WEIGHTS_FILE, Domain, DomainNet
from pacorl.judge.local import TINY_JUDGE, LocalJudge
from pacorl.judge.paco_reward import PacoReward
from pacorl.models.policies.flux import FLUX, TRAINED_WITH
from pacorl.tiny import characters
from pacorl.types import Question, Size

REASON = "this judge knows the tiny world of drawn characters only, and "
DRAWN = tuple(characters.draw(panel, 64) for panel in characters.all_panels()[:4000:3000])
NOISE = Image.effect_noise((64, 64), 90).convert("RGB")


@pytest.fixture(scope="module")
def domain() -> Domain:
    domain = Domain.load(TINY_JUDGE)
    assert domain is not None
    return domain


@pytest.fixture(scope="module")
def judge() -> LocalJudge:
    return LocalJudge.from_pretrained("tiny", decline=True)


@pytest.fixture(scope="module")
def measure() -> Iterator[ModuleType]:
    """`benchmarks/judge_domain.py`, whose photographs, textures and grids were not learned from."""
    path = Path(__file__).parents[2] / "benchmarks" / "judge_domain.py"
    spec = importlib.util.spec_from_file_location("judge_domain", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["judge_domain"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["judge_domain"]


# --- what is outside: a small sample of what benchmarks/judge_domain.py measures -------------------------------


def test_photographs_are_outside(domain: Domain, measure: ModuleType) -> None:
    pytest.importorskip("matplotlib", reason="it brings a photograph")
    paths = measure.photographs([])
    assert {"china", "flower", "grace_hopper"} <= {path.stem for path in paths}
    rng = random.Random(0)
    outside = domain.outside([image for path in paths for image in measure.views(path, 20, rng)])
    assert sum(outside) / len(outside) >= 0.97, f"{sum(outside)} of {len(outside)}"


@pytest.mark.slow
def test_textures_are_outside(domain: Domain, measure: ModuleType) -> None:
    declined = {name: sum(domain.outside(images)) for name, images in measure.textures(6, seed=1)}
    assert len(declined) == 10
    assert sum(declined.values()) >= 57, declined


def test_drawings_are_inside(domain: Domain, measure: ModuleType) -> None:
    for kind, images in measure.drawings(10):
        assert sum(domain.outside(images)) == 0, kind


@pytest.mark.slow
def test_what_generators_paint_is_inside_however_little_they_have_learned(domain: Domain, measure: ModuleType) -> None:
    trained, spoiled = (FLUX.from_pretrained("tiny", **TRAINED_WITH) for _ in range(2))
    random_adapter(spoiled.transformer, spoiled.lora_targets, spread=0.15, seed=99)
    images = [*measure.grids(trained, 4, steps=4), *measure.grids(spoiled, 4, steps=4)]
    for size in (Size(64, 64), Size(128, 128)):  # an untrained one leaves the noise as it is
        grids = trained.decode(trained.noise(range(7000, 7012), size), size)
        images += [*grids, *(panel for grid in grids for panel in split(grid, characters.Grid(2, 2)))]
    outside = domain.outside(images)
    assert len(outside) == 200
    assert sum(outside) <= 2


def test_it_is_the_image_that_counts_and_not_its_file(domain: Domain, tmp_path: Path) -> None:
    """The same drawing as JPEG, enlarged, and with transparency; a strip that no judge looks at is refused."""
    DRAWN[0].save(tmp_path / "a.jpg", quality=85)
    versions = [Image.open(tmp_path / "a.jpg"), DRAWN[0].resize((300, 300)), DRAWN[0].convert("RGBA")]
    assert domain.outside(versions) == [False] * 3
    assert domain.outside([]) == []
    with pytest.raises(ImageError, match="too long"):
        domain.outside([Image.new("RGB", (4, 4000))])


# --- the files -------------------------------------------------------------------------------------------------


def test_it_is_saved_and_loaded(domain: Domain, tmp_path: Path) -> None:
    domain.save(tmp_path)
    again = Domain.load(tmp_path)
    assert again is not None
    assert (again.name, again.size, again.threshold) == (domain.name, domain.size, domain.threshold)
    assert torch.equal(again.logits([*DRAWN, NOISE]), domain.logits([*DRAWN, NOISE]))
    assert sum((TINY_JUDGE / name).stat().st_size for name in (SETTINGS_FILE, WEIGHTS_FILE)) < 200_000


def test_a_checkpoint_without_one_declines_nothing(tmp_path: Path) -> None:
    assert Domain.load(tmp_path) is None


@pytest.mark.parametrize("file", [SETTINGS_FILE, WEIGHTS_FILE])
def test_a_damaged_one_is_named(domain: Domain, tmp_path: Path, file: str) -> None:
    domain.save(tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:20])
    with pytest.raises(ValueError, match=rf"{SETTINGS_FILE}: not a judge's domain"):
        Domain.load(tmp_path)


def test_one_of_nan_is_named_and_not_taken_for_a_judge_who_knows_everything(domain: Domain, tmp_path: Path) -> None:
    domain.save(tmp_path)
    weights = load_file(tmp_path / WEIGHTS_FILE)
    weights["head.bias"][:] = torch.nan
    save_file(weights, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"^[^\n]*not a judge's domain .*head\.bias holds NaN"):
        Domain.load(tmp_path)
    del weights["head.bias"]
    save_file(weights, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"^[^\n]*not a judge's domain [^\n]*head\.bias[^\n]*$"):
        Domain.load(tmp_path)


# --- the judge of this process ---------------------------------------------------------------------------------


def test_verdicts_about_images_outside_are_missing_and_say_why(judge: LocalJudge) -> None:
    text = questions.consistent()
    asked = [
        Question(DRAWN, text),
        Question((DRAWN[0], NOISE), text),
        Question((NOISE, NOISE.rotate(90)), text),
        Question((NOISE,), questions.shows_text("red round hero")),
    ]
    inside, one, both, single = judge.verdicts(asked)
    assert inside == LocalJudge.from_pretrained("tiny").verdicts(asked[:1])[0]
    assert inside.p_yes is not None
    assert [verdict.p_yes for verdict in (one, both, single)] == [None] * 3
    assert [verdict.declined for verdict in (inside, one, both, single)] == [False, True, True, True]
    assert one.error == REASON + "image 2 shows something else"
    assert both.error == REASON + "image 1 and image 2 show something else"
    assert single.error == REASON + "the image shows something else"
    with pytest.raises(RuntimeError, match="image 2 shows something else"):
        judge.explain(asked[1])
    assert judge.explain(asked[0])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_an_adapters_own_domain_counts(domain: Domain, tmp_path: Path) -> None:
    """An adapter may have learned more than its base, which brings a domain too."""
    model = AutoModelForImageTextToText.from_pretrained(TINY_JUDGE)
    get_peft_model(model, LoraConfig(r=1, target_modules=r".*language_model.*\.q_proj")).save_pretrained(tmp_path)
    own = Domain(domain.net, "another world", domain.size, domain.threshold)
    own.save(tmp_path)
    judge = LocalJudge.from_pretrained("tiny", adapter=str(tmp_path), decline=True)
    assert judge.domain is not None
    assert judge.domain.name == "another world"


def test_both_orders_decline_as_one() -> None:
    judge = LocalJudge.from_pretrained("tiny", decline=True, symmetric=True)
    drawn, mixed = judge.verdicts([Question(DRAWN, "Same?"), Question((NOISE, DRAWN[0]), "Same?")])
    assert drawn.order_gap is not None
    assert (mixed.p_yes, mixed.declined, mixed.error) == (None, True, REASON + "image 1 shows something else")


def test_nothing_is_declined_unasked() -> None:
    """A reward builds its judge so: noise is judged, and punished."""
    judge = LocalJudge.from_pretrained("tiny")
    assert judge.domain is None
    (verdict,) = judge.verdicts([Question((NOISE, NOISE), questions.consistent())])
    assert verdict.p_yes is not None
    assert verdict.p_yes < 0.1


def test_a_benchmark_measures_what_a_judge_says_of_anything() -> None:
    options = BenchmarkOptions(judge="tiny")
    with opened_judge(options, all_spellings=False) as measured, PacoReward.from_pretrained("tiny") as door:
        assert measured.judge.domain is None
        assert door.judge.domain is not None
        assert measured.note == door.note


class Saying(DomainNet):
    """Says one logit of every image."""

    def __init__(self, logit: float) -> None:
        super().__init__(1)
        self.logit = logit

    def forward(self, pixels_B3HW: torch.Tensor) -> torch.Tensor:
        return torch.full((len(pixels_B3HW),), self.logit)


@pytest.mark.parametrize(("threshold", "outside"), [(2.0, False), (0.5, True), (-2.0, True)])
def test_an_image_is_outside_above_the_threshold_of_its_checkpoint(threshold: float, outside: bool) -> None:
    domain = Domain(Saying(1.0), "a world", size=8, threshold=threshold)
    assert domain.outside([Image.new("RGB", (8, 8))] * 2) == [outside] * 2
