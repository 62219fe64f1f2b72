"""The TOML of a run: what is refused and how it is said; the printed configuration cannot drift from the Structs."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.errors import InputError
from peer import config
from peer.config_text import PRESETS, dump, render

MODEL = '[model]\nfamily = "gpt2"\n[data]\npath = "books"\n'


def refusal(text: str) -> str:
    with pytest.raises(InputError) as caught:
        config.parse(text, "run.toml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[modle]\nfamily = 1", "run.toml: unknown key modle; did you mean model?"),
        ('[model]\nfamly = "gpt2"', "run.toml: unknown key model.famly; did you mean model.family?"),
        ("[model.gpt2]\nlayer = 2", "unknown key model.gpt2.layer; did you mean model.gpt2.layers?"),
        ("[batch]\nlr = 1.0", "unknown key batch.lr; did you mean optimizer.lr?"),
        ("[swarm]\nzzz = 1", "known here: address, local, compute, allow_peers"),
        ("batch = 3", "run.toml: batch is a table: write [batch]"),
        ("[batch]\nmicro_batches = 0", "batch.micro_batches = 0: expected `int` >= 1"),
        ("[run]\nseed = 1.5", "run.seed = 1.5: expected `int`"),
        ('[run]\nname = "a b"', "run.name = 'a b'"),
        ("[run]\nsteps = 1" + 23 * "0", "run.steps = 1" + 23 * "0" + ": give a number within its range"),
        ("[run]\nsteps = 1" + 12 * "0", "run.steps = 1" + 12 * "0" + ": expected `int` <= 1000000000"),
        ("[batch]\nmicro_batch_size = 9999999999", "batch.micro_batch_size = 9999999999: expected `int` <= 1048576"),
        ("[optimizer]\nbetas = [0.9, 1.0]", "optimizer.betas[1] = 1.0: expected `float` < 1.0"),
        ('[run]\nname = ".."', "run.name = '..'"),
        ('[run]\ndir = "a\\u0000b"', "run.dir = 'a\\x00b': no text holds a NUL character"),
        ('[swarm]\nallow_peers = ["me"]', "swarm.allow_peers[0] = 'me': expected `str` matching"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan: give a finite number"),
        ("[optimizer]\nclip_norm = inf", "optimizer.clip_norm = inf: give a finite number"),
        ('[numerics]\ndtype = "int4"', "numerics.dtype = 'int4': use one of 'float32', 'bfloat16'"),
        ('[numerics]\ncompression = "zip it"', "numerics.compression = 'zip it'"),
        ("[model.resnet]\ndepths = [2, 0]", "model.resnet.depths[1] = 0: expected `int` >= 1"),
        ('[model]\nfamily = "hf:x"', "use one of 'gpt2', 'resnet'; a transformers folder goes into model.hf"),
        ("run = {", "run.toml: not valid TOML"),
        ("", "set exactly one of model.family, model.hf and model.function"),
        ('[model]\nfamily = "gpt2"\nhf = "x"', "set exactly one of"),
        (MODEL + "[model.gpt2]\nwidth = 30\nheads = 4", "model.gpt2.width = 30 is no multiple of heads = 4"),
        ('[model]\nfamily = "gpt2"', "data.path is missing"),
        ('[model]\nfamily = "gpt2"\n[data]\nkind = "mnist"', "model.family = 'gpt2' cannot read data.kind = 'mnist'"),
        (
            '[model]\nfunction = "thing"\n[data]\nkind = "mnist"',
            "model.function = 'thing': write it as module:function",
        ),
        (MODEL + "[optimizer]\ndecay_steps = 5", "optimizer.decay_steps = 5 must be above warmup = 100, or 0"),
        (MODEL + "[optimizer]\nnesterov = true", "optimizer.nesterov needs momentum > 0"),
    ],
)
def test_a_bad_key_is_named_with_its_path_and_the_fix(text: str, said: str) -> None:
    assert said in refusal(text)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_the_printed_configuration_says_what_the_defaults_are(preset: str) -> None:
    text = render(preset)
    printed = config.parse(text)
    uncommented = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert uncommented != text
    assert config.parse(uncommented) == printed
    for section, values in PRESETS[preset].items():
        for key, value in values.items():
            assert getattr(getattr(printed, section), key) == value


def test_every_key_is_explained() -> None:
    text = render("gpt2") + render("resnet")
    for section in msgspec.structs.fields(config.Config):
        for field in msgspec.structs.fields(section.default):
            if not isinstance(field.default, config.Section):
                assert re.search(rf"^# \S.*\n(# )?{field.name} = ", text, flags=re.MULTILINE), field.name


SECTIONS = {f.name: [k.name for k in msgspec.structs.fields(f.default)] for f in msgspec.structs.fields(config.Config)}
VALUES = st.recursive(
    st.integers() | st.text(max_size=4) | st.floats() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["layers", "depths", "x"]), inner),
    max_leaves=4,
)
TABLES = st.fixed_dictionaries(
    {},
    optional={n: VALUES | st.dictionaries(st.sampled_from(keys), VALUES, max_size=2) for n, keys in SECTIONS.items()},
)


@given(TABLES)
def test_any_table_is_a_configuration_or_one_line(raw: dict[str, object]) -> None:
    try:
        config.check(raw, "x")
    except InputError as e:
        assert str(e).startswith("x: ")


PEERS = st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZ", min_size=44, max_size=44).map("12D3KooW".__add__)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(TEXTS, st.floats(min_value=1e-9, max_value=1e9), st.lists(PEERS, max_size=3))
def test_a_kept_configuration_reads_back_equal(path: str, lr: float, peers: list[str]) -> None:
    settings = config.check({"model": {"family": "gpt2"}, "data": {"path": "x" + path}}, "x")
    settings = config.replace(settings, "optimizer", lr=lr)
    settings = config.replace(settings, "swarm", allow_peers=peers)
    assert config.parse(dump(settings)) == settings


def test_changes_from_the_command_line_are_checked_alike() -> None:
    settings = config.parse(MODEL)
    assert config.replace(settings, "run", steps=7).run.steps == 7
    with pytest.raises(InputError, match=r"run\.steps = 0"):
        config.replace(settings, "run", steps=0)


def test_the_optimizer_as_volunteers_get_it() -> None:
    settings = config.parse(MODEL + "[run]\nsteps = 70\n[optimizer]\nwarmup = 5\nclip_norm = 0\nno_decay = ['*.bias']")
    spec = settings.optimizer_spec()
    assert (spec.schedule.kind, spec.schedule.warmup, spec.schedule.total) == ("cosine", 5, 70)
    assert spec.clip_norm is None
    assert config.replace(settings, "run", steps=5).optimizer_spec().schedule.total == 0
    assert [(g.pattern, g.weight_decay) for g in spec.groups] == [("*.bias", 0.0)]
