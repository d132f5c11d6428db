"""What every operator promises: the protocol, advantages = kernel @ deltas, padding, detachment, errors, names."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.errors import ConfigError, EvidenceError
from comppo.transport import OPERATORS, CompGAE, build_operator
from comppo.types import Credit, Evidence, TransportOperator

EXACT = {"rtol": 1e-11, "atol": 1e-11}
VARIANTS = [
    ("group_relative", {}),
    ("group_relative", {"baseline": "leave_one_out", "scale": "none"}),
    ("gae", {"gamma": 0.97, "lam": 0.8}),
    ("gae", {"length_alpha": 0.1, "critic_lam": 1.0}),
    ("comp_gae", {"gamma": 0.97, "lam": 0.8}),
    ("comp_gae", {"gate_bootstrap": False}),
    ("comp_gae", {"gate_trace": False, "lam": 1.0}),
    ("redistribute", {"scale": "batch"}),
    ("redistribute", {"baseline": "none", "scale": "none"}),
    ("prefix_tree", {"prior": 0.7}),
]
every = pytest.mark.parametrize(("name", "params"), VARIANTS)


def evidence_of(rollout, **changes):
    fields = {
        "rewards": rollout.rewards,
        "mask": rollout.mask,
        "values": rollout.values,
        "gates": rollout.gates,
        "bootstrap_values": rollout.bootstrap_values,
        "completion_ids": rollout.ids,
        "weights": rollout.weights,
        "negative_weights": 1 - rollout.weights,
        "num_generations": 2,
    }
    return Evidence(**(fields | changes))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), groups=st.integers(1, 3), tokens=st.integers(0, 40), partly=st.booleans())
@every
def test_advantages_are_kernel_times_deltas(make_rollout, poison, name, params, seed, groups, tokens, partly):
    rollout = make_rollout(seed, 2 * groups, tokens)
    scorable = torch.arange(2 * groups) % 3 != 1 if partly else None
    evidence = evidence_of(rollout, scorable=scorable)
    operator = build_operator(name, **params)
    assert isinstance(operator, TransportOperator)
    credit, deltas, kernel = operator(evidence), operator.deltas(evidence), operator.kernel(evidence)
    torch.testing.assert_close((kernel @ deltas[..., None])[..., 0], credit.advantages, **EXACT)
    assert torch.equal(kernel, kernel.triu()), "credit flows backwards only"
    trained = rollout.mask if scorable is None else rollout.mask & scorable[:, None]
    for tensor in (credit.advantages, credit.returns, deltas, kernel.sum(1), kernel.sum(2)):
        assert not bool(tensor[~trained].any())
    dirty = {key: poison(getattr(rollout, key), rollout.mask) for key in ("rewards", "values", "gates", "weights")}
    dirty["negative_weights"] = poison(1 - rollout.weights, rollout.mask)
    again = operator(evidence_of(rollout, scorable=scorable, **dirty))
    torch.testing.assert_close((again.advantages, again.returns), (credit.advantages, credit.returns), **EXACT)
    dirty_evidence = evidence_of(rollout, scorable=scorable, **dirty)
    torch.testing.assert_close(operator.deltas(dirty_evidence), deltas, **EXACT)
    torch.testing.assert_close(operator.kernel(dirty_evidence), kernel, **EXACT)


@every
def test_an_unscorable_row_may_hold_anything_and_counts_nowhere(make_rollout, name, params):
    rollout = make_rollout(5, 6, 30)
    scorable = torch.tensor([True, True, True, False, True, True])
    clean = build_operator(name, **params)(evidence_of(rollout, scorable=scorable))
    rewards = rollout.rewards.clone()
    rewards[3] = float("nan")
    dirty = build_operator(name, **params)(evidence_of(rollout, scorable=scorable, rewards=rewards))
    assert torch.equal(dirty.advantages, clean.advantages) and torch.equal(dirty.returns, clean.returns)
    assert not bool(clean.advantages[3].any())


@every
def test_padding_side_and_amount_change_nothing(make_rollout, name, params):
    rollout = make_rollout(3, 4, 30)
    plain = build_operator(name, **params)(evidence_of(rollout))
    for left, right in ((0, 9), (6, 0), (20, 50)):
        padded = type(rollout)(**vars(rollout))
        for key in ("rewards", "values", "gates", "weights", "ids", "mask"):
            setattr(padded, key, torch.nn.functional.pad(getattr(rollout, key), (left, right), value=0))
        credit = build_operator(name, **params)(evidence_of(padded))
        inside = slice(left, left + 30)
        torch.testing.assert_close(credit.advantages[:, inside], plain.advantages, **EXACT)
        torch.testing.assert_close(credit.returns[:, inside], plain.returns, **EXACT)


@every
def test_nothing_is_attached(make_rollout, name, params):
    rollout = make_rollout(3, 4, 30)
    attached = {
        key: getattr(rollout, key).requires_grad_()
        for key in ("rewards", "values", "gates", "weights", "bootstrap_values")
    }
    evidence = evidence_of(rollout, response_rewards=attached["bootstrap_values"], **attached)
    operator = build_operator(name, **params)
    credit = operator(evidence)
    for tensor in (credit.advantages, credit.returns, operator.deltas(evidence), operator.kernel(evidence)):
        assert not tensor.requires_grad


@every
def test_missing_evidence_is_named(make_rollout, name, params):
    rollout = make_rollout(3, 4, 30)
    operator = build_operator(name, **params)
    for field in operator.needs:
        evidence = evidence_of(rollout, **{field: None})
        for use in (operator, operator.deltas):
            if field == "weights" and use == operator.deltas:
                continue  # the residual does not depend on weights
            with pytest.raises(EvidenceError, match=rf"needs Evidence\.{field}, which is None"):
                use(evidence)
    unneeded = {"values", "gates", "completion_ids", "weights", "negative_weights", "bootstrap_values"} - operator.needs
    operator(evidence_of(rollout, **dict.fromkeys(unneeded)))


def test_the_registry_builds_what_it_names():
    assert set(OPERATORS) == {"group_relative", "gae", "comp_gae", "redistribute", "prefix_tree"}
    operator = build_operator("comp_gae", lam=0.5, gate_trace=False)
    assert operator == CompGAE(lam=0.5, gate_trace=False)
    assert build_operator(operator) is operator
    with pytest.raises(dataclasses.FrozenInstanceError):
        operator.lam = 1.0


def test_registry_errors():
    with pytest.raises(ConfigError, match=r"operator must be one of group_relative, gae, .*, got 'ppo'"):
        build_operator("ppo")
    with pytest.raises(ConfigError, match="gae has no setting 'lambda_': it has gamma, lam, length_alpha, critic_lam"):
        build_operator("gae", lambda_=0.9)
    with pytest.raises(ConfigError, match="lam must lie in"):
        build_operator("gae", lam=1.5)
    with pytest.raises(ConfigError, match="settings lam were given with a finished operator"):
        build_operator(CompGAE(), lam=0.9)


def test_an_object_of_ones_own_is_an_operator(make_rollout):
    class LastTokenOnly:
        needs = frozenset[str]()

        def __call__(self, evidence: Evidence) -> Credit:
            return Credit(advantages=self.deltas(evidence), returns=evidence.rewards)

        def deltas(self, evidence):
            return evidence.rewards * 0

        def kernel(self, evidence):
            return torch.eye(evidence.rewards.shape[1]).expand(evidence.rewards.shape[0], -1, -1)

    mine = LastTokenOnly()
    assert build_operator(mine) is mine


def test_transport_imports_torch_and_jaxtyping_alone():
    """In a fresh interpreter: neither trainers nor what they stand on come along."""
    code = (
        "import sys, comppo.transport\n"
        "heavy = {'transformers', 'trl', 'torchrl', 'comppo.computation', 'comppo.critic', 'comppo.update'}\n"
        "print(sorted(heavy & set(sys.modules)), 'comppo.transport.reference' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[] False"
