"""Recipes: strict keys with near matches, strict types, overrides, and plain values only from YAML."""

import pytest
import yaml

from shards.errors import ConfigError
from tests.support import RECIPES
from trainer.config.recipe_file import all_keys, recipe_yaml
from trainer.config.schema import Recipe
from trainer.run.recipe import check_recipe, load_recipe, recipe_schema

RECIPE = """
seed: 3
data:
  train: {source: digits, shards: data/train}
  eval:
    test: {source: digits, split: test, shards: data/test, limit: 100}
labels: {noise: symmetric, ratio: 0.3}
image: {size: 8, pad: 1, mean: [0.3, 0.3, 0.3]}
model: {name: digits_cnn}
batch: {global: 32}
methods: [standard, coteaching, coteaching_incv]
incv: {epochs: 5, rounds: 2}
standard:
  epochs: 5
  optimizer: {kind: adam, learning_rate: 2e-3, milestones: [[3, 5e-4]]}
coteaching: {epochs: 5, forget_rate: 0.3}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def refused(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_a_recipe_as_written(recipe):
    loaded = load_recipe(recipe)
    assert (loaded.seed, loaded.batch.global_, loaded.image.mean) == (3, 32, (0.3, 0.3, 0.3))
    assert loaded.methods == ("standard", "coteaching", "coteaching_incv")
    assert loaded.standard.optimizer.milestones == ((3, 0.0005),)
    assert loaded.data.eval["test"].limit == 100
    assert loaded.data.train.split == "train"  # a default


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path):
    assert isinstance(load_recipe(path), Recipe)


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        ("labels.ratoi=0.1", "labels.ratoi", "labels.ratio"),
        ("label.ratio=0.1", "label", "labels"),
        ("batch.globl=3", "batch.globl", "batch.global"),
        (
            "standard.optimizer.lerning_rate=0.1",
            "standard.optimizer.lerning_rate",
            "standard.optimizer.learning_rate",
        ),
        ("data.eval.test.sorce=x", "data.eval.test.sorce", "source"),
        ("execution.worker=2", "execution.worker", "execution.workers"),
        ("epochs=3", "epochs", "epochs"),
        ("learning_rate=3", "learning_rate", "optimizer.learning_rate"),
    ],
)
def test_an_unknown_key_lists_near_matches(recipe, override, key, near):
    message = refused(recipe, override)
    assert f"unknown key `{key}`; did you mean" in message
    assert near in message.partition("did you mean")[2]
    assert message.startswith(f"override {override!r}: ")


def test_an_error_names_the_recipe_for_its_own_keys_and_the_override_for_those_of_the_command_line(recipe):
    recipe.write_text(recipe.read_text() + "\nxyzzy: 1\n")
    with_both = refused(recipe, "labels.ratoi=0.1", "standard.epochs=0").splitlines()
    assert [line.partition(": ")[0] for line in with_both] == [
        "override 'labels.ratoi=0.1'",
        "override 'standard.epochs=0'",
        str(recipe),
    ]
    assert refused(recipe).startswith(f"{recipe}: unknown key `xyzzy`")


def test_an_error_of_keys_that_contradict_names_the_recipe_and_the_override(recipe):
    override = "standard.optimizer.schedule=cosine"
    content = yaml.safe_load(recipe.read_text())
    content["standard"]["optimizer"] = {"milestones": [[1, 0.1]]}
    recipe.write_text(yaml.safe_dump(content))
    assert refused(recipe, override).startswith(f"{recipe} with override {override!r}: optimizer.milestones")
    assert refused(recipe, "standard.optimizer={schedule: cosine, milestones: [[1, 0.1]]}").startswith("override ")


def test_an_unknown_key_with_nothing_near_lists_the_keys_there(recipe):
    message = refused(recipe, "image.quality_of_jpegs=3")
    assert "unknown key `image.quality_of_jpegs`; keys here: size, resize, pad" in message


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("standard.epochs=2.0", "standard.epochs"),
        ("standard.epochs=1e1", "standard.epochs"),
        ("standard.epochs=true", "standard.epochs"),
        ("standard.epochs='3'", "standard.epochs"),
        ("standard.epochs=0", "standard.epochs"),
        ("standard.epochs=", "standard.epochs"),
        ("image.flip=1", "image.flip"),
        ("image.mean=[0.5, 0.5]", "image.mean"),
        ("image.mean=[a, b, c]", "image.mean"),
        ("image.fill=mirror", "image.fill"),
        ("model.name=3", "model.name"),
        ("seed=-1", "seed"),
        ("seed=0.5", "seed"),
        ("labels.ratio=1.5", "labels.ratio"),
        ("labels.ratio=-0.1", "labels.ratio"),
        ("labels.ratio=.nan", "labels.ratio"),
        ("labels.ratio=high", "labels.ratio"),
        ("labels.noise=gaussian", "labels.noise"),
        ("incv.max_unusable=2", "incv.max_unusable"),
        ("execution.workers=0", "execution.workers"),
        ("standard.optimizer.learning_rate=0", "standard.optimizer.learning_rate"),
        ("standard.optimizer.momentum=1", "standard.optimizer.momentum"),
        ("standard.optimizer.milestones=[[3.5, 0.1]]", "standard.optimizer.milestones"),
        ("standard.optimizer.milestones=[3]", "standard.optimizer.milestones"),
        ("methods=standard", "methods"),
        ("methods=[standrd]", "methods"),
        ("methods=3", "methods"),
        ("data.train=x", "data.train"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(recipe, override, key):
    message = refused(recipe, override)
    assert f"`{key}" in message
    assert "pydantic" not in message


def test_a_cosine_leaves_no_room_for_milestones_or_an_endless_warm_up(recipe):
    cosine = "standard.optimizer={schedule: cosine, warmup_epochs: 4.5}"
    assert load_recipe(recipe, [cosine]).standard.optimizer.schedule == "cosine"
    assert "optimizer.milestones have no effect" in refused(recipe, "standard.optimizer.schedule=cosine")
    assert "leaves none of the 4 epochs" in refused(recipe, cosine, "standard.epochs=4")


def test_a_missing_key_is_named(recipe):
    recipe.write_text(RECIPE.replace("batch: {global: 32}\n", "").replace("name: digits_cnn", ""))
    message = refused(recipe)
    assert "missing key `batch`" in message
    assert "missing key `model.name`" in message


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1E-3", 0.001), ("2.5e-4", 0.00025), ("1e0", 1.0), (".5", 0.5), ("1.e-2", 0.01), ("1", 1.0)],
)
def test_numbers_as_people_write_them(recipe, text, value):
    recipe.write_text(RECIPE.replace("2e-3", text))
    for loaded in (load_recipe(recipe), load_recipe(recipe, [f"standard.optimizer.learning_rate={text}"])):
        rate = loaded.standard.optimizer.learning_rate
        assert (type(rate), rate) == (float, value)


def test_words_that_only_look_like_numbers_stay_words(recipe):
    for word in ("e3", "1e", "resnet10t", "-", "+", "."):
        assert load_recipe(recipe, [f"model.name={word!r}"]).model.name == word
    assert load_recipe(recipe, ["model.name=e3"]).model.name == "e3"


def test_overrides(recipe):
    loaded = load_recipe(
        recipe,
        [
            "seed=7",
            "data.train.limit=50",
            "data.eval.other={source: cifar10, shards: x}",
            "image.mean=[0.1, 0.2, 0.3]",
            "standard.optimizer={kind: sgd}",
            "standard.optimizer.momentum=0.5",
            "execution.log_every=1",
            "model.options.drop_rate=0.1",
            "labels.seed=null",
            "seed=8",
        ],
    )
    assert loaded.seed == 8  # the last one wins
    assert loaded.data.train.limit == 50
    assert sorted(loaded.data.eval) == ["other", "test"]
    assert loaded.image.mean == (0.1, 0.2, 0.3)
    assert (loaded.standard.optimizer.kind, loaded.standard.optimizer.momentum) == ("sgd", 0.5)
    assert loaded.standard.optimizer.learning_rate == 0.001  # the section was replaced
    assert loaded.execution.log_every == 1
    assert loaded.model.options == {"drop_rate": 0.1}
    assert recipe.read_text() == RECIPE


def test_an_override_may_hold_an_equals_sign(recipe):
    assert load_recipe(recipe, ["data.train.shards=a=b"]).data.train.shards == "a=b"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed", "a.b=c"),
        ("=3", "a.b=c"),
        ("seed.x=1", "`seed`"),
        ("methods.0=standard", "`methods`"),
        ("seed=[", "YAML"),
    ],
)
def test_an_override_that_cannot_be_applied(recipe, override, told):
    message = refused(recipe, override)
    assert told in message
    assert repr(override) in message


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("incv.remove_ratio=from_noise", "incv", "remove_ratio", "from_noise"),
        ("incv.remove_ratio=2.5", "incv", "remove_ratio", 2.5),
        ("incv.remove_ratio=0", "incv", "remove_ratio", 0.0),
        ("coteaching_incv.warmup_epochs=3", "coteaching_incv", "warmup_epochs", 3),
        ("coteaching_incv.warmup_epochs=from_noise", "coteaching_incv", "warmup_epochs", "from_noise"),
        ("coteaching.forget_rate=estimate", "coteaching", "forget_rate", "estimate"),
        ("coteaching.forget_rate=1", "coteaching", "forget_rate", 1.0),
        ("coteaching_incv.noise_of_selected=confident", "coteaching_incv", "noise_of_selected", "confident"),
        ("coteaching_incv.noise_of_selected=0.2", "coteaching_incv", "noise_of_selected", 0.2),
    ],
)
def test_keys_of_a_word_or_a_number(recipe, override, section, key, value):
    assert getattr(getattr(load_recipe(recipe, [override]), section), key) == value


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("incv.remove_ratio=from_nois", "'from_noise'"),
        ("incv.remove_ratio=-1", "0"),
        ("coteaching_incv.warmup_epochs=1.5", "integer"),
        ("coteaching.forget_rate=1.5", "1"),
        ("coteaching_incv.noise_of_selected=guess", "'confident'"),
    ],
)
def test_such_a_key_is_named_without_the_members_of_its_union(recipe, override, told):
    message = refused(recipe, override)
    key = override.partition("=")[0].rpartition(".")[2]
    assert f".{key}`: " in message
    assert told in message
    assert "literal[" not in message
    assert "constrained" not in message


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["labels.file=x.csv"], ["labels.file", "labels.noise"]),
        (["labels.noise=none"], ["labels.ratio"]),
        (["labels.noise=matrix", "labels.ratio=0"], ["labels.matrix", "labels.noise: matrix"]),
        (["labels.noise=matrix", "labels.matrix=[[1.0]]"], ["labels.ratio"]),
        (["labels.matrix=[[1.0]]"], ["labels.matrix", "labels.noise: matrix"]),
        (["image.resize=16"], ["image.pad"]),
        (["image.resize=4", "image.pad=0"], ["image.resize", "image.size"]),
        (["methods=[standard, standard]"], ["methods"]),
        (["standard=null"], ["`standard:`"]),
        (["coteaching=null"], ["`coteaching:`"]),
        (["incv=null"], ["`incv:`"]),
        (["incv=null", "methods=[coteaching]", "coteaching.forget_rate=estimate"], ["`incv:`"]),
    ],
)
def test_values_that_do_not_go_together(recipe, overrides, keys):
    message = refused(recipe, *overrides)
    assert all(key in message for key in keys), message


def test_values_that_do(recipe):
    assert load_recipe(recipe, ["labels={file: x.csv}"]).labels.file == "x.csv"
    matrix = load_recipe(recipe, ["labels={noise: matrix, matrix: [[0.9, 0.1], [0, 1]]}"]).labels.matrix
    assert matrix == ((0.9, 0.1), (0.0, 1.0))
    assert load_recipe(recipe, ["incv=null", "methods=[standard, coteaching]"]).incv is None


def test_a_section_that_inherits_takes_the_keys_it_leaves_unset(recipe):
    both = ["methods=[coteaching, coteaching_incv]", "coteaching.rank=one_pass", "coteaching.ramp_epochs=7"]
    own = ["coteaching_incv.rank=eval_first", "coteaching_incv.optimizer.learning_rate=0.5"]
    loaded = load_recipe(recipe, [*both, "coteaching.optimizer.kind=sgd", *own])
    assert (loaded.section("coteaching").rank, loaded.section("coteaching_incv").rank) == ("one_pass", "eval_first")
    assert loaded.section("coteaching_incv").ramp_epochs == 7
    optimizer = loaded.section("coteaching_incv").optimizer
    assert (optimizer.kind, optimizer.learning_rate) == ("sgd", 0.5)
    assert loaded.section("coteaching").optimizer.learning_rate == 0.001
    assert not hasattr(loaded.section("coteaching"), "warmup_epochs")


def test_the_true_ratio_is_that_of_the_labels_and_needs_one(recipe):
    overrides = ["methods=[coteaching]", "coteaching.forget_rate=true_ratio"]
    loaded = load_recipe(recipe, [*overrides, "labels={noise: symmetric, ratio: 0.2}"])
    assert loaded.section("coteaching").forget_rate == "true_ratio"
    assert "coteaching.forget_rate" in refused(recipe, *overrides, "labels={noise: none}")


@pytest.mark.parametrize(
    "text",
    [
        "seed: !!python/object/apply:os.system ['touch {marker}']",
        "seed: !!python/object/new:pathlib.Path ['{marker}']",
        "seed: !!python/name:os.system",
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{marker}']]",
    ],
)
def test_yaml_builds_no_objects(recipe, tmp_path, text):
    marker = tmp_path / "executed"
    text = text.format(marker=marker)
    recipe.write_text(text + "\n")
    assert "not valid YAML" in refused(recipe)
    recipe.write_text(RECIPE)
    assert "not valid YAML" in refused(recipe, "seed=" + text.removeprefix("seed: "))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is a mapping of keys to values"),
        ("- 1\n", "is a mapping of keys to values"),
        ("seed: [", "not valid YAML"),
        ("\tseed: 1", "not valid YAML"),
        ("seed: 2020-01-01\n", "date"),
        ("1: 2\n", "unknown key `1`"),
    ],
)
def test_files_that_are_no_recipes(recipe, text, told):
    recipe.write_text(text)
    message = refused(recipe)
    assert told in message
    assert str(recipe) in message


def test_a_file_that_cannot_be_read(tmp_path):
    assert "incv ls" in refused(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in refused(tmp_path / "binary.yaml")


def test_a_resolved_recipe_is_the_recipe(recipe, tmp_path):
    loaded = load_recipe(recipe, ["standard.optimizer.learning_rate=1e-7"])
    text = recipe_yaml(loaded)
    (tmp_path / "resolved.yaml").write_text(text)
    assert load_recipe(tmp_path / "resolved.yaml") == loaded
    content = yaml.safe_load(text)
    assert content["batch"] == {"global": 32, "micro": None}
    assert content["execution"]["log_every"] == 20  # defaults are written out
    assert recipe_yaml(load_recipe(tmp_path / "resolved.yaml")) == text


def test_a_recipe_cannot_be_changed(recipe):
    loaded = load_recipe(recipe)
    with pytest.raises(ValueError, match="frozen"):
        loaded.seed = 4
    with pytest.raises(ValueError, match="frozen"):
        loaded.batch.global_ = 4


def test_all_keys_are_those_a_recipe_may_have():
    keys = set(all_keys(recipe_schema()))
    assert {"seed", "batch.global", "data.train.limit", "standard.optimizer.learning_rate"} <= keys
    assert not any("global_" in key for key in keys)


def test_a_recipe_from_elsewhere_is_named_by_its_origin():
    with pytest.raises(ConfigError, match="the manifest: missing key `data`"):
        check_recipe({}, "the manifest")


@pytest.mark.parametrize("text", ["seed: &a [*a]\n", "a: " + "[" * 3000 + "]" * 3000], ids=["alias", "depth"])
def test_a_recipe_that_nests_for_ever_is_refused(recipe, text):
    recipe.write_text(text)
    assert any(word in refused(recipe) for word in ("nested", "recursive"))


def test_a_key_written_twice_is_refused(recipe):
    recipe.write_text(RECIPE + "seed: 7\n")
    assert "'seed' occurs twice" in refused(recipe)


@pytest.mark.parametrize(
    ("override", "key"),
    [("image.std=[0, 1, 1]", "image.std"), ("standard.optimizer.learning_rate=.inf", "standard.optimizer")],
)
def test_values_that_cannot_train_are_refused(recipe, override, key):
    assert key in refused(recipe, override)


def test_aliases_that_unfold_without_end_are_refused(recipe):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    recipe.write_text("\n".join(lines))
    assert "values" in refused(recipe)


def test_incv_alone_needs_no_method(recipe):
    assert load_recipe(recipe, ["methods=[]"]).methods == ()
    assert "nothing to do" in refused(recipe, "methods=[]", "incv=null")
