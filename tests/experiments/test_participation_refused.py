"""What a user is told who asks a method for less than every client."""

from __future__ import annotations

import pytest

from experiments.config import load_run_file
from fedsir.errors import BadInput


def test_a_method_that_needs_everybody_is_named_with_the_remedy() -> None:
    with pytest.raises(BadInput) as caught:
        load_run_file("demo", ["method=rhfl", "training.participation=0.5"])
    said = str(caught.value)
    assert "training.participation is 0.5, but method rhfl needs every client in every round" in said
    assert "choose another method" in said


@pytest.mark.parametrize("value", ["0", "1.5", "-0.1", "true", "some"])
def test_shares_without_meaning_are_refused_by_name(value: str) -> None:
    with pytest.raises(BadInput, match=r"training\.participation"):
        load_run_file("demo", [f"training.participation={value}"])


def test_a_share_is_taken() -> None:
    config = load_run_file("demo", ["method=fedavg", "training.participation=0.25"])
    assert config.training.participation == 0.25
    assert config.identity() != load_run_file("demo", ["method=fedavg"]).identity()
