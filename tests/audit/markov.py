"""A task whose value function is known: a Markov chain over tokens, and a Transformer that is exactly that chain.

A response goes from token to token until end of text. It is right (reward 1) if it ends by itself just after a token of
`GOOD`, and wrong if it ends elsewhere or is cut off. V(state, tokens left) follows by recursion.
"""

import torch

PAD, EOS = 0, 1
VOCABULARY = 8
GOOD = (2, 3, 4)
LIMIT = 20
NOTHING = 1e-30


def transitions(seed=0):
    """P[i, j]: probability of token j after token i, float64; `PAD` never comes."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64) ** 3 + 0.02
    table[:, PAD] = NOTHING
    table[:, EOS] = 0.15
    return table / table.sum(1, keepdim=True)


def make_model(seed=0):
    """A Llama whose layers add nothing: one-hot embeddings, RMSNorm, and log-probabilities as output weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=VOCABULARY, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(100.0 * torch.eye(VOCABULARY))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        # RMSNorm makes a one-hot row of length sqrt(width)
        model.lm_head.weight.copy_(transitions(seed).log().T / VOCABULARY**0.5)
    return model


def exact_values(seed=0):
    """V[left, token]: chance that a response ends right, with `left` tokens still to come after `token`; float64."""
    table = transitions(seed)
    values = torch.zeros(LIMIT + 1, VOCABULARY, dtype=torch.float64)
    good = torch.zeros(VOCABULARY, dtype=torch.float64)
    good[list(GOOD)] = 1.0
    for left in range(1, LIMIT + 1):
        values[left] = table[:, EOS] * good + table[:, 2:] @ values[left - 1, 2:]
    return values


def reward(prompt, response):
    """1 where the response ended just after a good token."""
    if response[-1] != EOS:
        return 0.0
    return float((response[-2] if len(response) > 1 else prompt[-1]) in GOOD)


def scorer(prompts):
    """The verifier in the audit's convention."""
    return lambda owners, responses: [reward(prompts[i], ids) for i, ids in zip(owners, responses, strict=True)]


def exact_state_values(prompt, response, seed=0):
    """V of the state before each token, and after the last one the outcome; float64."""
    values = exact_values(seed)
    tokens = [prompt[-1], *response[:-1]]
    inside = [values[LIMIT - t, token] for t, token in enumerate(tokens)]
    return torch.stack([*inside, torch.tensor(reward(prompt, response), dtype=torch.float64)])


def simulate(prompts, group, continuations, generator):
    """Responses to random one-token prompts, straight from the table; values with the noise of real continuations.

    Continuations of a state are right with the chance V(state), so the mean of k of them is binomial(k, V) / k.

    Returns:
        Exact advantages, those of two halves of the continuations, and mask: (prompts * group, LIMIT) each; outcomes.
    """
    rows, half = prompts * group, continuations // 2
    table, values = transitions(), exact_values()
    good = torch.zeros(VOCABULARY, dtype=torch.float64)
    good[list(GOOD)] = 1.0
    state = torch.randint(2, VOCABULARY, (prompts,), generator=generator).repeat_interleave(group)
    going, outcome = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.float64)
    worth, mask = torch.zeros(rows, LIMIT, dtype=torch.float64), torch.zeros(rows, LIMIT, dtype=torch.bool)
    for t in range(LIMIT):
        mask[:, t] = going
        worth[:, t] = torch.where(going, values[LIMIT - t, state], 0.0)
        token = torch.multinomial(table[state], 1, generator=generator).squeeze(1)
        ends = going & (token == EOS)
        outcome = torch.where(ends, good[state], outcome)
        going = going & ~ends
        state = torch.where(going, token, state)
    drawn = [torch.binomial(torch.full_like(worth, half), worth, generator=generator) / half for _ in range(2)]
    last = mask & ~torch.cat((mask[:, 1:], torch.zeros_like(mask[:, :1])), 1)

    def advantages(v):
        after = torch.cat((v[:, 1:], torch.zeros_like(v[:, :1])), 1)
        return torch.where(mask, torch.where(last, outcome[:, None], after) - v, 0.0)

    return advantages(worth), advantages(drawn[0]), advantages(drawn[1]), mask, outcome
