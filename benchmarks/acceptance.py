"""The acceptance of a draft's tokens, computed and not counted: python benchmarks/acceptance.py.

The target samples texts after the benchmark's prompts, and at each place the distributions of both models, p and q,
give the exact probability that a token of the draft is accepted there: no noise is left but that of the texts.
Prints, for each temperature and way to accept,

- per place: the mean over the places of the texts,
- per try: the same over the places at which a session tries a proposed token, which leaves out the bonus tokens, and
- tokens/round: the mean acceptance length of a session,

with standard errors over prompts, and ratios. `specd bench` shows the last two as it counts them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specd.worker.cpu.openblas import load_blas

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class Text:
    """The target's samples after a prompt, and the scores of both models there, [tokens, vocabulary]."""

    prompt: str
    token_ids: NDArray[np.int64]
    target: Floats
    draft: Floats
    guesses: NDArray[np.int64]  # what the draft proposes at each place under COUPLED, with the noise of the text


def coupled(p: Floats, q: Floats) -> Floats:
    """Return P(argmax(log p + g) = argmax(log q + g) = x) for each token x; rows are places, g is Gumbel noise.

    That is 1 / sum_y max(p_y / p_x, q_y / q_x) (Daliri, Musco, Suresh, arXiv 2408.07978). The maximum is the first
    where p_y / q_y is at least p_x / q_x: with the tokens in this order, two running sums give it.
    """
    tiny = np.finfo(np.float64).tiny
    p, q = np.maximum(p, tiny), np.maximum(q, tiny)
    order = np.argsort(p / q, axis=-1)
    p_sorted, q_sorted = np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)
    p_from = np.cumsum(p_sorted[..., ::-1], axis=-1)[..., ::-1]
    q_before = np.cumsum(q_sorted, axis=-1) - q_sorted
    both = np.empty_like(p)
    np.put_along_axis(both, order, 1 / (p_from / p_sorted + q_before / q_sorted), -1)
    return both


# P(the target says x, and x was proposed and accepted), for each token x.
METHODS: dict[str, Callable[[Floats, Floats], Floats]] = {
    "rejection": np.minimum,
    "coupled": coupled,
    "independent": np.multiply,
}
# COUPLED again, counted with the very noise that the texts were sampled with.
AS_SAMPLED = "coupled, as sampled"


def rounds(accepted: Floats, num_draft_tokens: int) -> tuple[float, float, float]:
    """Return how many rounds, tries and accepted tokens a session expects that says this text.

    `accepted` [tokens] are the probabilities that the token of each place is accepted if it is tried. The first token
    is the prefill's. Rounds count that cannot reach past the end.
    """
    starts = np.zeros(len(accepted) + num_draft_tokens + 1)
    starts[1] = 1
    num_rounds = num_tries = num_accepted = 0.0
    for place in range(1, len(accepted) - num_draft_tokens):
        reached = starts[place]
        num_rounds += reached
        for i in range(num_draft_tokens):
            num_tries += reached
            starts[place + i + 1] += reached * (1 - accepted[place + i])
            reached *= accepted[place + i]
            num_accepted += reached
        starts[place + num_draft_tokens + 1] += reached
    return num_rounds, num_tries, num_accepted


def estimate(statistic: Callable[[Floats], float], count: int) -> tuple[float, float]:
    """Return a statistic of prompts, and its standard error by the jackknife.

    The statistic takes weights [count], a 1 for each prompt; in turn one of them is 0.
    """
    without = [statistic(weights) for weights in 1 - np.eye(count)]
    return float(statistic(np.ones(count))), float(np.sqrt((count - 1) * np.var(without)))


@dataclass(frozen=True)
class Counts:
    """The result of a method in the texts of each prompt, [prompts]."""

    sums: Floats  # of the probabilities of acceptance at all places
    places: Floats
    rounds: Floats
    tries: Floats
    accepted: Floats

    def per_place(self, weights: Floats) -> float:
        return float((weights @ self.sums) / (weights @ self.places))

    def per_try(self, weights: Floats) -> float:
        return float((weights @ self.accepted) / (weights @ self.tries))

    def tokens_per_round(self, weights: Floats) -> float:
        return float(1 + (weights @ self.accepted) / (weights @ self.rounds))


COLUMNS = {"per place": Counts.per_place, "per try": Counts.per_try, "tokens/round": Counts.tokens_per_round}


def measure(texts: Sequence[Text], num_draft_tokens: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return means and their standard errors by method, or ratio of methods, and column."""
    prompts = sorted({text.prompt for text in texts})
    counts = {name: np.zeros((5, len(prompts))) for name in (*METHODS, AS_SAMPLED)}
    for text in texts:
        p, q = softmax(text.target), softmax(text.draft)
        said = np.arange(len(text.token_ids)), text.token_ids
        for name, count in counts.items():
            if name == AS_SAMPLED:
                mean = accepted = (text.guesses == text.token_ids).astype(float)
            else:
                both = METHODS[name](p, q)
                mean, accepted = both.sum(-1), np.minimum(both[said] / p[said], 1)
            count[:, prompts.index(text.prompt)] += mean.sum(), len(mean), *rounds(accepted, num_draft_tokens)

    methods = {name: Counts(*count) for name, count in counts.items()}
    results = {
        name: {column: estimate(partial(statistic, own), len(prompts)) for column, statistic in COLUMNS.items()}
        for name, own in methods.items()
    }
    for name in ("rejection", "independent"):
        results[f"coupled / {name}"] = {
            column: estimate(partial(_quotient, statistic, methods["coupled"], methods[name]), len(prompts))
            for column, statistic in COLUMNS.items()
        }
    return results


def _quotient(statistic: Callable[[Counts, Floats], float], above: Counts, below: Counts, weights: Floats) -> float:
    return statistic(above, weights) / statistic(below, weights)


def softmax(scores: Floats) -> Floats:
    exponentials = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    result: Floats = exponentials / exponentials.sum(-1, keepdims=True)
    return result


def sample_texts(
    target_name: str,
    draft_name: str,
    *,
    blas: str,
    temperature: float,
    num_prompts: int,
    texts_per_prompt: int,
    max_tokens: int,
) -> list[Text]:
    """Let the target sample texts with the noise of specd's sessions, and the draft read along."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from tokenizers import Tokenizer

    from specd.bench.prompts import load_prompts
    from specd.sampling import Sampling
    from specd.worker.model.loader import load
    from specd.worker.sampling.noise import Purpose
    from specd.worker.sampling.sampler import Sampler

    target, draft = load(target_name, blas=blas), load(draft_name, blas=blas)
    tokenizer = Tokenizer.from_str(target.tokenizer_json.decode())
    size = min(target.info.vocabulary_size, draft.info.vocabulary_size)
    prompts = load_prompts()
    texts = []
    for number, name in enumerate(list(prompts)[:: max(1, len(prompts) // num_prompts)][:num_prompts]):
        prompt_ids = tokenizer.encode(prompts[name]).ids
        seeds = [1000 * number + i for i in range(texts_per_prompt)]
        samplers = [Sampler(Sampling(temperature=temperature, seed=seed), size) for seed in seeds]
        models = [(model.network, make_prompt_cache(model.network)) for model in (target, draft)]
        for network, cache in models:
            network(mx.array([prompt_ids[:-1]]), cache=cache)
            for layer in cache:
                layer.keys, layer.values = (
                    mx.repeat(array, texts_per_prompt, axis=0) for array in (layer.keys, layer.values)
                )
            mx.eval([(layer.keys, layer.values) for layer in cache])
        latest = mx.array([prompt_ids[-1]] * texts_per_prompt)
        steps = []
        for position in range(len(prompt_ids), len(prompt_ids) + max_tokens):
            scores = [
                samplers[0].scores(network(latest[:, None], cache=cache)[:, -1, :size], position, None)
                for network, cache in models
            ]
            noise = mx.concatenate([sampler.noise.gumbel(Purpose.SAMPLE, position, 1) for sampler in samplers])
            latest, guess = (mx.argmax(each + noise, axis=-1) for each in scores)
            steps.append([np.array(array) for array in (latest, *scores, guess)])
        token_ids, target_scores, draft_scores, guesses = (np.stack(arrays) for arrays in zip(*steps, strict=True))
        for i in range(texts_per_prompt):
            ends = np.flatnonzero(np.isin(token_ids[:, i], target.info.eos_token_ids))
            last = int(ends[0]) + 1 if ends.size else max_tokens
            arrays = (array[:last, i] for array in (token_ids, target_scores, draft_scores, guesses))
            texts.append(Text(name, *arrays))
    return texts


def main() -> None:
    from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--draft", default=EMBEDDED_DRAFT)
    parser.add_argument("-t", "--temperature", type=float, action="append", help="can be repeated (default: 0.7 1.0)")
    parser.add_argument("-k", "--num-draft-tokens", type=int, default=4, help="for the last two columns")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--texts", type=int, default=6, help="for each prompt")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, help="for each text")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    temperatures = arguments.temperature or [0.7, 1.0]
    if min(temperatures) < 0.01:
        parser.error("the temperature must be 0.01 or more: greedy choices are not a matter of probability")
    blas = load_blas(num_threads=2)

    results = []
    for temperature in temperatures:
        texts = sample_texts(
            arguments.target,
            arguments.draft,
            blas=blas,
            temperature=temperature,
            num_prompts=arguments.num_prompts,
            texts_per_prompt=arguments.texts,
            max_tokens=arguments.max_tokens,
        )
        measured = measure(texts, arguments.num_draft_tokens)
        places = sum(len(text.token_ids) for text in texts)
        print(f"\ntemperature {temperature:g}, k = {arguments.num_draft_tokens}, {len(texts)} texts, {places} places")
        print(f"{'':24}" + "".join(f"{column:>20}" for column in COLUMNS))
        for name, row in measured.items():
            print(f"{name:24}" + "".join(f"{mean:11.4f} ± {error:.4f}" for mean, error in row.values()))
        results.append({"temperature": temperature, "places": places, **measured})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
