"""How ranks agree, in a world of one."""

from __future__ import annotations

from tlora_megatron.training.resident.staging import Agreement, Readiness, gather_texts


def test_one_process_agrees_with_itself() -> None:
    agreement = Agreement(None)
    for word in ({"commands": []}, {"commands": [{"kind": "note", "text": "é" * 9000}]}):
        agreement.begin(word)
        assert agreement.read() == word
    assert gather_texts(None, "why") == ["why"]


def test_jobs_that_are_prepared_or_refused_are_known_others_are_not() -> None:
    assert Readiness(None, {"a": 5, "b": None, "c": -1}).read() == {"a": True, "c": False}
    assert Readiness(None, {}).read() == {}
