"""Makes a run usable as a model of lm-evaluation-harness (docs/evaluation.md)."""

from collections.abc import Sequence
from typing import Any

import jax

from shardwright.data.text.tokenizers import Tokenizer
from shardwright.sampling.sampler import Sampler, Sampling
from shardwright.sampling.scoring import Scorer, log_likelihoods
from shardwright.settings.program import has_package


def language_model(scorer: Scorer, tokenizer: Tokenizer, weights: Any) -> Any:
    """Makes an lm_eval.api.model.TemplateLM with these weights, for
    lm_eval.simple_evaluate(model=…).

    Texts begin with bos, as in training. Token ids, likelihoods and rolling windows equal those of
    lm-eval's model `hf` on the exported checkpoint. Rolling likelihoods equal those with its
    add_bos_token=False, without which it reads bos twice.

    Args:
        scorer: computes the losses.
        tokenizer: of the run's data.
        weights: of the model, sharded as in training on the scorer's mesh.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class LanguageModel(TemplateLM):
        eot_token_id = tokenizer.end
        prefix_token_id = scorer.config.bos_id
        max_length = scorer.length
        tokenizer_name = "shardwright"

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: object
        ) -> list[int]:
            return [self.prefix_token_id] * (add_special_tokens is not False) + tokenizer.ids(
                string
            )

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            found = list(
                log_likelihoods(scorer, weights, ((context, text) for _, context, text in requests))
            )
            for request, result in zip(requests, found, strict=True):
                self.cache_hook.add_partial("loglikelihood", request[0], result)
            return found

        def loglikelihood_rolling(self, requests: Any, **_: object) -> list[float]:
            texts = [tokenizer.ids(request.args[0]) for request in requests]
            windows = [
                get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
                for ids in texts
            ]
            cut = [[*map(make_disjoint_window, of_text)] for of_text in windows]
            found = log_likelihoods(scorer, weights, (pair for text in cut for pair in text))
            return [sum(next(found)[0] for _ in text) for text in cut]

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            by_settings: dict[Sampling, list[int]] = {}
            # 256 tokens by default, as in lm-eval.
            options = [normalize_gen_kwargs(dict(request.args[1]), 256) for request in requests]
            for i, of_request in enumerate(options):
                settings = Sampling(
                    max_tokens=of_request["max_gen_toks"],
                    temperature=of_request.get("temperature") or 0.0,
                    top_k=of_request.get("top_k") or None,
                    top_p=of_request.get("top_p") or 1.0,
                    stop=() if tokenizer.end is None else (tokenizer.end,),
                )
                by_settings.setdefault(settings, []).append(i)
            found = [""] * len(requests)
            for settings, numbers in by_settings.items():
                room = max(1, scorer.length - settings.max_tokens)
                prompts = [tokenizer.ids(requests[i].args[0])[-room:] for i in numbers]
                context = min(scorer.length, max(map(len, prompts)) + settings.max_tokens)
                with jax.set_mesh(scorer.mesh):
                    drawn = Sampler(scorer.step, settings, context).generate(weights, prompts)
                for i, prompt, ids in zip(numbers, prompts, drawn, strict=True):
                    text = tokenizer.continuation(
                        prompt, ids[:-1] if ids[-1] in settings.stop else ids
                    )
                    until = options[i].get("until") or []
                    for end in filter(None, [until] if isinstance(until, str) else until):
                        text = text.split(end)[0]
                    found[i] = text
            return found

    return LanguageModel()


def check_tasks(names: Sequence[str]) -> None:
    """Raises ValueError for training.evals with tasks if lm-eval is not installed."""
    if names and not has_package("lm_eval"):
        raise ValueError(
            f"training.evals has {names[0]!r}, a task of lm-eval, which is not installed: run pip "
            "install -e '.[eval]'"
        )


def run_harness(
    model: Any, names: Sequence[str], task_path: str | None = None, **options: Any
) -> dict[str, Any]:
    """Evaluates a `language_model` on tasks of lm-eval; `task_path` is a directory with further
    ones.

    Returns results, versions, numbers of samples, and a `table` to print. Raises ValueError for an
    unknown task.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    manager = TaskManager(include_path=task_path)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ValueError(
            f"lm-eval has no task {unknown[0]!r}. `lm-eval ls tasks` lists its own; "
            "task_path=<directory> adds others."
        )
    found: Any = lm_eval.simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, **options
    )
    return {name: found[name] for name in ("results", "versions", "n-samples")} | {
        "table": make_table(found)
    }
