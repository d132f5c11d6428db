"""Pages from tensors: what is refused, what is written, and that nothing is lost on the way."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from comppo.errors import ConfigError, EvidenceError
from comppo.inspect import OperatorCredit, operator_credit, report
from comppo.inspect.token_text import token_texts
from comppo.report.inspect_page import as_script_data, render
from comppo.report.inspection import Inspection, Operator, Quantity, Sample, TokenCredit

from .conftest import OTHERS, WORDS, batch, tokenise

ROWS = [["a", " b"], ["c", "d"]]
ONES = {"ones": torch.ones(2, 2)}


def data_of(path) -> dict:
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def refusal(error: type[Exception], tmp_path, **arguments) -> str:
    with pytest.raises(error) as caught:
        report(tmp_path / "page.html", **{"responses": ROWS, "operators": ONES, **arguments})
    assert not list(tmp_path.iterdir())
    return str(caught.value)


@pytest.mark.parametrize("name", list(batch([list("abcd")] * 2)[1]))
def test_how_an_operator_carries_is_its_kernel(name):
    operator, evidence = batch([tokenise(WORDS), tokenise(OTHERS)])[1][name]
    credit = operator_credit(operator, evidence)
    kernel, mask = operator.kernel(evidence), evidence.mask
    rebuilt = torch.zeros_like(kernel)
    for row in range(2):
        places = mask[row].nonzero().flatten().tolist()
        for start, t in enumerate(places):
            product = 1.0
            for count, u in enumerate(places[start:], start + 1):
                if credit.decays is not None:
                    rebuilt[row, t, u] = product
                    product *= float(credit.decays[row, u])
                else:
                    seen = credit.weights[row, places[:count]].sum()
                    rebuilt[row, t, u] = count * credit.weights[row, t] / seen if seen > 0 else 1.0
    torch.testing.assert_close(rebuilt, kernel, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close((rebuilt @ credit.deltas[..., None])[..., 0], credit.advantages, rtol=1e-6, atol=1e-9)


def test_numbers_arrive(tmp_path):
    advantages = torch.tensor([[0.125, -1.0 / 3], [torch.nan, 7e-9]])
    path = report(
        tmp_path / "page.html",
        responses=ROWS,
        operators={"mine": OperatorCredit(advantages=advantages, gates=torch.rand(2, 2), about="Mine.")},
        rewards=[1.0, None],
        mask=torch.tensor([[True, False], [True, True]]),
        values=torch.zeros(2, 2),
        quantities={"Surprise": torch.tensor([[1.0, -1.0], [0.0, 2.0]])},
        num_generations=2,
        prompts=["p", "p"],
    )
    data = data_of(path)
    first, second = data["samples"]
    assert first["credit"][0]["advantages"] == [0.125, pytest.approx(-1 / 3, rel=1e-7)]
    assert second["credit"][0]["advantages"] == [None, pytest.approx(7e-9)]
    assert (first["reward"], second["reward"]) == (1.0, None)
    assert (first["trained"], second["trained"]) == ([1, 0], None)
    assert first["group"] == second["group"] == 0
    assert [q["label"] for q in data["quantities"]] == ["Advantage", "Gate", "Value V", "Surprise"]
    assert data["quantities"][-1]["scale"] == "diverging"
    assert data["operators"] == [{"label": "mine", "sentence": "Mine."}]
    assert [data["vocabulary"][i][0] for i in first["tokens"]] == ROWS[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(tmp_path, side):
    real = torch.tensor([[True, True, False], [True, False, False]])
    real = real if side == "right" else real.flip(1)
    advantages = torch.where(real, torch.tensor([[1.0], [2.0]]), torch.nan)
    path = report(
        tmp_path / "page.html", responses=[["a", "b"], ["c"]], completion_mask=real, operators={"mine": advantages}
    )
    assert [s["credit"][0]["advantages"] for s in data_of(path)["samples"]] == [[1.0, 1.0], [2.0]]


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {"<end>": 256}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def test_parts_of_characters_stay_bytes(tmp_path):
    tokenizer = byte_level()
    ids = tokenizer("a €")["input_ids"]
    texts = token_texts(tokenizer, [*ids, 256])
    assert texts == ["a", " ", "\udce2", "\udc82", "\udcac", "<end>"]
    path = report(
        tmp_path / "page.html",
        responses=torch.tensor([ids]),
        tokenizer=tokenizer,
        operators={"ones": torch.ones(1, len(ids))},
    )
    assert ["⟨byte E2⟩", 1] in [piece for _, shown in data_of(path)["vocabulary"] for piece in shown]


def test_nothing_is_overwritten(tmp_path):
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"mine\.html.*not overwritten: choose another name"):
        report(mine, responses=ROWS, operators=ONES)
    assert mine.read_text() == "mine"
    named = report(tmp_path / "pages", responses=ROWS, operators=ONES)
    assert re.fullmatch(r"inspect-[0-9a-f]{12}\.html", named.name) and named.parent == tmp_path / "pages"
    written = named.stat().st_mtime_ns
    assert report(tmp_path / "pages", responses=ROWS, operators=ONES) == named  # the same page, left as it is
    assert named.stat().st_mtime_ns == written
    assert report(tmp_path / "pages", responses=ROWS, operators=ONES, title="Other") != named


def test_data_cannot_leave_its_script():
    text = as_script_data(["</script>", "<!--", "&amp;", "\u2028\u2029", "\udce2"])
    assert text.isascii() and not set(text) & set("<>&")
    assert json.loads(text) == ["</script>", "<!--", "&amp;", "\u2028\u2029", "\udce2"]


def test_the_policy_allows_nothing_but_the_page(two):
    text = two.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("sha256-") == 2
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"operators": {"mine": torch.ones(3, 2)}}, r"operators\['mine'\]\.advantages has shape \(3, 2\)"),
        ({"values": torch.ones(2, 1)}, r"values has shape \(2, 1\), but responses need \(2, 2 or more\)"),
        ({"logps": torch.ones(2)}, r"logps has shape \(2,\)"),
        ({"mask": torch.ones(1, 2)}, r"mask has shape \(1, 2\)"),
        ({"quantities": {"x": torch.ones(5, 2)}}, r"quantities\['x'\] has shape"),
        ({"rewards": [1.0]}, "rewards has 1 entries, but there are 2 responses"),
        ({"prompts": "one text"}, "prompts has one text"),
        ({"labels": ["a"]}, "labels has 1 entries"),
        ({"num_generations": 3}, "num_generations=3 does not divide the 2 responses"),
        ({"responses": []}, "responses have no rows"),
        ({"responses": torch.ones(2, 2), "tokenizer": object()}, "responses must be integer token ids"),
        ({"completion_mask": torch.ones(2, 3)}, r"responses\[0\] has 2 tokens, but completion_mask has 3"),
        ({"rewards": torch.ones(2, 2)}, "one number per response"),
    ],
)
def test_shapes_are_refused_by_name(tmp_path, arguments, said):
    assert re.search(said, refusal(EvidenceError, tmp_path, **arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"responses": torch.ones(2, 2, dtype=torch.long)}, "tokenizer is None: pass it"),
        ({"responses": ["text", "text"]}, r"responses\[0\] must be a list with the text of each token, got str"),
        ({"operators": {}}, "operators and series are empty"),
        ({"operators": {"x": [1.0]}}, r"operators\['x'\]\.advantages must be a tensor"),
        ({"responses": [[], []]}, "samples hold no token"),
        ({"top_keys": [[[(0, 1.0)]] * 2] * 2}, "pass the prompt as its tokens"),
        ({"top_keys": [[[(9, 1.0)]] * 2] * 2, "prompts": [["p"], ["p"]]}, "outside the 3 tokens"),
        ({"top_keys": [[], []], "prompts": [["p"], ["p"]]}, r"keys has 0 entries for 2 tokens"),
        ({"quantities": {"": torch.ones(2, 2)}}, "no name"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, arguments, said):
    assert re.search(said, refusal(ConfigError, tmp_path, **arguments))


def test_records_are_checked():
    credit = TokenCredit(advantages=[1.0])
    sample = Sample(label="a", tokens=["x"], credit=[credit])
    inspection = Inspection(title="t", operators=[Operator(label="o")], samples=[sample])
    assert "application/json" in render(inspection)
    with pytest.raises(ConfigError, match="credit has 1 entries, but there are 0 operators"):
        both = Sample(label="a", tokens=["x"], credit=[credit], series={"value": [1.0]})
        render(Inspection(title="t", operators=[], samples=[both]))
    with pytest.raises(ConfigError, match="'value' is there twice, or built in"):
        render(
            Inspection(
                title="t",
                operators=[Operator(label="o")],
                samples=[sample],
                quantities=[Quantity(key="value", label="v", sentence="")],
            )
        )
    with pytest.raises(ConfigError, match="series has 'mine': describe it"):
        odd = Sample(label="a", tokens=["x"], credit=[], series={"mine": [1.0]})
        render(Inspection(title="t", operators=[], samples=[odd]))
