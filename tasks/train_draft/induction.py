"""An induction head to start from: 'what followed this token the last time follows it again'.

Answers copy from their prompts and from themselves, and copying is what attention is slowest to find by gradient
steps alone (Olsson et al. 2022, In-context Learning and Induction Heads, arXiv:2209.11895). The EAGLE-3 layer needs no
second layer for it: at position j it reads the embedding of x_{j+1} beside states in which x_j can still be
read. So a query made of x_{t+1} finds the positions j with x_j = x_{t+1}, and their value, x_{j+1}, is the draft of
x_{t+2}.

Four linear maps are fitted to training states. Tokens get a short code: the directions in which their embeddings
differ most, whitened. Ridge regression reads the code of x_j from the first aux slot. fc writes it into directions
that the last slot hardly uses; keys read it there, queries compute it from the embedding, both in rotary dimensions
that turn too slowly for distance to matter. Values carry the embedding's leading directions and o_proj turns them
into rows of the target's head.

The gains are small enough for training to keep, bend or drop the head. On the embedded default it is worth 0.2 of
predicted acceptance length (without and with it: 1.74 and 1.95 after 100 steps, 1.84 and 2.07 after 200). Twice the
match score with four times the copy undid it (1.78): a head that is too sure of itself is not unlearnt.
"""

import torch

from tasks.common.draft import Eagle3Draft
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates, Sample

# Aux states [n, n_aux, H] and tokens [n].
TrainingStates = tuple[torch.Tensor, torch.Tensor]
# Tokens the maps are fitted to: a few dozen for each direction of the code.
MAX_TOKENS = 16384
# Score of a matching key over a chance one, in nats.
_MATCH = 5.0
# Share of what is copied in the residual, whose entries are of order 1 after the norm.
_COPY = 10.0
# The code's size in the state beside the last slot.
_CODE = 4.0
# Ridge, relative to the variance of each input.
_RIDGE = 0.03
# Rotary pairs that turn less than this, in radians a token, hold the code.
_SLOW = 0.01


@torch.no_grad()
def start_induction_head(draft: Eagle3Draft, states: TrainingStates, lm_head: torch.Tensor) -> None:
    """Set fc, and the first query head of each group of q_proj, k_proj, v_proj and o_proj; other heads stay.

    Args:
        draft: with weights set and fc selecting the last slot.
        states: of training, finite.
        lm_head: the target's, [V, H].
    """
    attention, hidden = draft.midlayer.self_attn, draft.config.hidden_size
    groups, head_dim = attention.kv_heads, attention.head_dim
    slow = (draft.rotary.inv_freq < _SLOW).nonzero().flatten().cpu()
    code_dims = torch.cat([slow, slow + head_dim // 2])
    # Few enough directions that the last slot does not miss those it gives up for the code.
    code_dims = code_dims[: max(1, hidden // 4 // groups)]
    value_dims = min(head_dim, hidden // groups)

    aux, tokens = states
    embeddings, head_rows = _unit_rms(draft.embed_tokens[tokens]), _unit_rms(lm_head[tokens])
    code = _whitened_directions(embeddings, groups * len(code_dims))
    free = _least_used_directions(aux[:, -1], groups * len(code_dims))
    read_code = _ridge(aux[:, 0], embeddings @ code)
    draft.fc.weight[:, -hidden:] -= free @ (free.T @ draft.fc.weight[:, -hidden:])
    draft.fc.weight[:, :hidden] += _CODE * free @ read_code.T
    typical_rms = (aux.flatten(1) @ draft.fc.weight.T).pow(2).mean(-1).sqrt().median()
    directions, copied = _copied_directions(embeddings, head_rows, groups * value_dims)

    q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    per_group = attention.heads // groups
    for group in range(groups):
        # Strong and weak directions are dealt out to the groups in turn, so that each can match by itself.
        dealt = slice(group, None, groups)
        key_rows = torch.arange(group * head_dim, (group + 1) * head_dim)
        query_rows = torch.arange(group * per_group * head_dim, group * per_group * head_dim + head_dim)
        for weight, rows in ((q, query_rows), (k, key_rows), (v, key_rows)):
            weight[rows] = 0
        o[:, query_rows] = 0
        q[query_rows[code_dims], :hidden] = _MATCH * head_dim**0.5 / len(code_dims) * code[:, dealt].T
        k[key_rows[code_dims], hidden:] = typical_rms / _CODE * free[:, dealt].T
        v[key_rows[:value_dims], :hidden] = directions[:, dealt].T
        o[:, query_rows[:value_dims]] = _COPY * copied[:, dealt]


def training_states(states: HiddenStates) -> TrainingStates:
    """Samples spread over a split, about `MAX_TOKENS` tokens at most.

    Raises:
        DraftlineError: a sample's states are not finite, named; or an aux slot never changes.
    """
    nonfinite = states.column("num_nonfinite")
    if nonfinite.any():
        first = int(nonfinite.argmax())
        raise DraftlineError(
            f"{states.folder}: sample {states.ids[first]} holds {nonfinite[first]} values that are NaN or Inf. "
            f"`python -m tasks.gate_hidden_states` lists all such samples; dump them again."
        )
    total = int(states.tokens.sum())
    return without_first_tokens(
        [states.read(index) for index in range(0, len(states), max(1, -(-total // MAX_TOKENS)))]
    )


def without_first_tokens(samples: list[Sample]) -> TrainingStates:
    """First tokens are left out: their states are those of an attention sink, hundreds of times larger than others.

    Raises:
        DraftlineError: an aux slot never changes.
    """
    aux = torch.cat([sample.aux[1:].float() for sample in samples])
    constant = (aux == aux[:1]).all(-1).all(0)
    if len(aux) > 1 and constant.any():
        raise DraftlineError(
            f"aux slot {int(constant.int().argmax())} holds the same values at all {len(aux)} tokens of samples {samples[0].id} to "
            f"{samples[-1].id}: nothing was captured there. Dump the hidden states again; `python -m tasks.gate_hidden_states` holds "
            f"them against the target's own."
        )
    return aux, torch.cat([sample.input_ids[1:].long() for sample in samples])


def _unit_rms(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.float()
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)


def _whitened_directions(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[H, count]: the directions in which rows [n, H] differ most, scaled to unit variance, blind to their mean."""
    mean = rows.mean(0)
    variances, directions = torch.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
    scaled = directions[:, -count:] / variances[-count:].clamp_min(1e-4 * variances[-1]).sqrt()
    along_mean = mean / mean.norm()
    return scaled - along_mean[:, None] * (along_mean @ scaled)


def _least_used_directions(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[H, count], orthonormal: where rows [n, H] have least energy."""
    return torch.linalg.eigh(rows.T @ rows / len(rows)).eigenvectors[:, :count]


def _ridge(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """[H, k]: least squares of centred outputs [n, k] from inputs [n, H]."""
    gram = inputs.T @ inputs
    return torch.linalg.solve(gram + _RIDGE * gram.diagonal().diag(), inputs.T @ (outputs - outputs.mean(0)))


def _copied_directions(embeddings, head_rows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, count] twice: leading directions of the embeddings, and for each the head's, by least squares.

    Where the target ties head and embedding, both are the same.
    """
    energies, directions = torch.linalg.eigh(embeddings.T @ embeddings / len(embeddings))
    energies, directions = energies[-count:].clamp_min(1e-4 * energies[-1]), directions[:, -count:]
    return directions, (head_rows.T @ embeddings / len(embeddings)) @ directions / energies
