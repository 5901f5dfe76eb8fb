from __future__ import annotations

import pytest

from pacorl.judge.http.http_judge import HttpJudge
from pacorl.judge.local import LocalJudge
from pacorl.serve.readiness import probe


def test_a_served_judge_is_probed(url: str, local_judge: LocalJudge) -> None:
    with HttpJudge.connect(url, model="judge") as judge:
        served = probe(judge, name="judge")
    local = probe(local_judge, name="local")
    assert served.served == {f"{url}/v1": ("judge",)}
    assert served.token_ids == local.token_ids
    assert served.p_yes_same == pytest.approx(local.p_yes_same, abs=1e-6)
    assert served.p_yes_different == pytest.approx(local.p_yes_different, abs=1e-6)
    assert served.versions[f"server at {url}/v1"].startswith("pacorl")
    assert (served.memory_gib, list(local.memory_gib)[:1]) == ({}, ["weights"])


def test_a_silent_judge_has_a_problem(local_judge: LocalJudge, url: str) -> None:
    with HttpJudge.connect(url, model="judge", timeout=1e-4, retries=0) as judge, pytest.raises(ConnectionError):
        probe(judge, name="judge")
