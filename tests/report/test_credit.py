from pathlib import Path

import pytest

from comppo.report.chart import MINUS
from comppo.report.credit import SHOWN_TOKENS, build, choose, colour_scale, signed
from comppo.report.data import GateHistogram, Response, Run


def response(prompt="p", reward=1.0, advantages=(1.0, -1.0), **more):
    size = len(advantages)
    more.setdefault("trained", (True,) * size)
    return Response(
        prompt=prompt, completion="c", reward=reward, tokens=("t",) * size, advantages=tuple(advantages), **more
    )


def run(*responses, label="CompPO", gates=None):
    return Run(
        folder=Path(label),
        name=label,
        title=label,
        label=label,
        seed=0,
        started="",
        command="",
        responses=responses,
        gates=gates,
    )


def test_a_success_and_a_failure_on_the_same_prompt():
    comppo = run(
        response("a", 1.0, gates=(0.9, 1.0)),
        response("b", 1.0, gates=(0.9, 1.0)),
        response("c", 0.0, gates=(0.9, 1.0)),
        response("b", 0.5, gates=(0.9, 1.0)),
        response("d", None, gates=(0.9, 1.0)),
    )
    grpo = run(response("x", 1.0), response("b", 1.0), response("y", 0.0), label="GRPO")
    kinds = choose([grpo, comppo])
    assert [title for title, _ in kinds] == ["Highest reward", "Lowest reward"]
    assert [[(index, r.prompt, r.reward) for index, r in group] for _, group in kinds] == [
        [(1, "b", 1.0), (0, "b", 1.0)],  # the gated run leads; both have solved b
        [(1, "c", 0.0), (0, "y", 0.0)],
    ]


def test_equal_rewards_give_one_response():
    kinds = choose([run(response("a", 0.0), response("b", 0.0))])
    assert [(title, len(group)) for title, group in kinds] == [("One response", 1)]


def test_a_run_without_a_failure_has_no_lowest():
    kinds = choose([run(response(reward=1.0), response(reward=0.0)), run(response(reward=1.0), label="GRPO")])
    assert [len(group) for _, group in kinds] == [2, 1]


def test_a_response_without_any_credit_is_the_last_choice():
    kinds = choose([run(response("silent", 1.0, (0.0, 0.0)), response("spoken", 1.0))])
    assert kinds[0][1][0][1].prompt == "spoken"


def test_nothing_saved_and_nothing_scored():
    assert build([run()]) == ([], 1.0)
    assert choose([run(response(reward=None))])[0][0] == "One response"


@pytest.mark.parametrize(
    ("advantages", "scale"),
    [((0.0, 0.0), 1.0), ((0.5, -0.5), 0.5), ((1.234, -0.2), 1.3), ((0.00123,), 0.0013), ((1.0,) * 99 + (50.0,), 1.0)],
)
def test_the_colour_scale_ignores_outliers(advantages, scale):
    assert colour_scale([response(advantages=advantages)]) == pytest.approx(scale)


def test_untrained_tokens_do_not_set_the_scale():
    assert colour_scale([response(advantages=(9.0, 1.0), trained=(False, True))]) == 1.0


def test_what_a_token_shows():
    histogram = GateHistogram(
        edges=(0.9, 1.0), counts=(1.0,), minimum=0.92, maximum=0.98, lower_bound=0.9, upper_bound=1.0
    )
    shown = response(
        advantages=(2.0, -1.0, 0.0, None),
        gates=(0.9, 0.975, 1.0, None),
        values=(0.5, None, 0.25, 0.0),
        logps=(0.0, -0.6931471805599453, None, -1.0),
        trained=(True, True, True, False),
    )
    (example,), scale = build([run(shown, gates=histogram)])
    (panel,) = example.panels
    assert scale == 2.0
    assert [token.sign for token in panel.tokens] == ["pos", "neg", "zero", "off"]
    assert [token.strength for token in panel.tokens] == ["1.000", "0.500", "0.000", "0.000"]
    assert [token.gate for token in panel.tokens] == ["0.000", "0.750", "1.000", None]
    assert panel.columns == ("Advantage", "Gate", "Value", "Probability")
    assert panel.tokens[1].row == (f"{MINUS}1.000", "0.9750", "—", "0.500")
    assert (
        panel.tokens[1].hint
        == f"1 · \u2068t\u2069 · advantage {MINUS}1.000 · gate 0.9750 · value — · probability 0.500"
    )
    assert "not trained" in panel.tokens[3].hint
    assert panel.bounds == ("0.9", "1")


def test_notes_tell_a_broadcast_from_a_pattern():
    flat, pattern = run(response(advantages=(0.5,) * 3)), run(response(advantages=(0.5, -0.25)))
    assert build([flat])[0][0].panels[0].note == "3 tokens, each with the advantage +0.500"
    assert build([pattern])[0][0].panels[0].note == f"2 tokens, advantages from {MINUS}0.250 to +0.500"
    nothing = run(response(advantages=(None, None), trained=(False, False)))
    assert build([nothing])[0][0].panels[0].note == "2 tokens, none trained"


def test_long_responses_are_cut():
    panel = build([run(response(advantages=(0.1,) * (SHOWN_TOKENS + 7)))])[0][0].panels[0]
    assert (len(panel.tokens), panel.hidden) == (SHOWN_TOKENS, 7)


def test_signs_are_typographic():
    assert (signed(-0.5), signed(0.5)) == (f"{MINUS}0.500", "+0.500")
