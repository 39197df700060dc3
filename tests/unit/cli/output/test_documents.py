from __future__ import annotations

import argparse
import json
import math

import pytest

from lastcall.cli import output


def test_json_holds_no_number_that_other_readers_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    output.document({"metrics": {"loss": math.nan, "lr": [math.inf, 1.0]}})
    output.line({"a": None})
    first, last = capsys.readouterr().out.rsplit("}\n", 2)[0] + "}", '{"schema": 1, "a": null}'
    assert json.loads(first) == {"schema": 1, "metrics": {"loss": "nan", "lr": ["inf", 1.0]}}
    assert json.loads(last) == {"schema": 1, "a": None}


def test_the_option_knows_the_fields_of_its_document() -> None:
    parser = argparse.ArgumentParser()
    output.add_json(parser, {"ok": "whether it is fine"})
    assert parser.parse_args([]).json is False
    assert parser.parse_args(["--json"]).json is True
    (option,) = [action for action in parser._actions if isinstance(action, output.JsonFlag)]
    assert option.fields == {"ok": "whether it is fine"}
