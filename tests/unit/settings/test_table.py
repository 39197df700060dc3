from __future__ import annotations

import dataclasses

from lastcall import settings
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig


def test_every_example_of_the_table_is_itself_accepted() -> None:
    for setting in settings.JIT + settings.PERIODIC:
        value = setting.parse(setting.example)
        assert setting.parse(value) == value
        if setting.default is not None:
            assert setting.parse(setting.default) == setting.default


def test_the_table_and_the_fields_are_the_same() -> None:
    for table, config in ((settings.JIT, JITCheckpointConfig), (settings.PERIODIC, PeriodicCheckpointConfig)):
        assert [setting.field for setting in table] == [f.name for f in dataclasses.fields(config)][:-1]
