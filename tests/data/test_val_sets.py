import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.data.prompts import DataConfig
from rlmodule.data.val_sets import sets_of


def test_a_list_is_a_set_without_a_name_and_empty_sets_are_none():
    assert sets_of(None) == sets_of([]) == sets_of({"a": []}) == {}
    assert sets_of(["f", "g"]) == {"": ["f", "g"]}
    assert sets_of({"a": "f", "b": ["g", "h"]}) == {"a": ["f"], "b": ["g", "h"]}
    assert DataConfig(val_files={"a": "f", "b": ["g"]}).files_of("test")[0] == ["f", "g"]


@pytest.mark.parametrize("wrong", ["file.jsonl", 3, {"a": 3}, [["a"]], {"a": [""]}, {"a": {"b": "c"}}])
def test_what_is_no_set_is_refused(wrong):
    with pytest.raises(ConfigError, match="neither a list of files nor a mapping"):
        DataConfig(val_files=wrong)


@pytest.mark.parametrize("name", ["a/b", "a b", "", "a@b"])
def test_a_name_that_cannot_stand_in_a_metric_is_refused(name):
    with pytest.raises(ConfigError, match="becomes part of the names of metrics"):
        DataConfig(val_files={name: ["f"]})
