"""Writes the dashboards as Grafana reads them: python -m deploy.grafana.generate.

Every panel's description says what it shows, which values are good, and what to do about others.
"""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.builder import (
    COORDINATOR,
    MODEL,
    WORKER,
    lines,
    make_dashboard,
    mean,
    per,
    quantiles,
    rate,
    states,
    variable,
)

DIRECTORY = Path(__file__).parent / "dashboards"

# From 8 on, positions would repeat the colours of the first ones.
_FIRST_POSITIONS = '{instance=~"$coordinator", model=~"$model", position=~"[0-7]"}'
_READY = '{instance=~"$coordinator", model=~"$model", state="ready"}'
_LOADED = f" unless on (job, instance, model) specd_model_state{_READY} == 0"
_FORCED = '{instance=~"$coordinator", model=~"$model", source="forced"}'


def speculation() -> dashboard.Dashboard:
    """Make the dashboard of acceptance, draft lengths and speed-up."""
    few_rounds = f"scalar(0.05 * {rate('specd_rounds_total', over='1m')})"

    def by_position(kind: str) -> str:
        return rate(f"specd_{kind}_tokens_by_position_total", "position", of=_FIRST_POSITIONS, over="1m")

    return make_dashboard(
        "Speculation",
        "specd-speculation",
        "Acceptance of the draft's tokens, and the speed-up over the target alone.",
        lines(
            "Acceptance rate",
            unit="percentunit",
            axis="accepted / proposed",
            text="Accepted over proposed tokens. 60 % and more is good for a draft of a tenth of the target's size. "
            "The rate depends on the text and on the temperature. If it is low for all your traffic, try another "
            "draft of the target's family: a larger one, or one that was trained on such text.",
            queries={
                "{{instance}} {{model}}": f"instance:specd_accepted_tokens_per_proposed_tokens:ratio_rate1m{MODEL}",
            },
        ),
        lines(
            "Acceptance by draft position",
            unit="percentunit",
            axis="accepted / proposed",
            text="Accepted over proposed tokens by draft position, from 0. A token is accepted only with all before "
            "it. With a fixed num_draft_tokens the rate falls with the position. Where it falls to nothing, set a "
            "smaller one. Where the service chooses, only confident proposals get far, and the positions look alike. "
            "Positions that fewer than one round in twenty reaches are left out.",
            queries={
                "{{position}}": f"{by_position('accepted')} / ({by_position('proposed')} > {few_rounds})",
            },
        ),
        lines(
            "Acceptance length",
            unit="suffix:tokens",
            axis="tokens a round",
            text="Tokens that a round emits, with the target's own token. 1 is the target alone. A larger value means "
            "fewer passes of the target.",
            queries={"{{instance}} {{model}}": f"instance:specd_generated_tokens_per_rounds:ratio_rate1m{MODEL}"},
        ),
        lines(
            "Speed-up over the target alone",
            unit="suffix:times",
            axis="times as fast",
            text="Estimated time of the target alone for the same tokens, over the measured time. The estimate comes "
            "from rounds without a draft. Below 1, drafting costs more than it gains. The service then stops it by "
            "itself, except for requests with a fixed num_draft_tokens.",
            queries={
                "{{instance}} {{model}}": f"instance:specd_target_only_seconds_per_round_seconds:ratio_rate1m{MODEL}"
            },
        ),
        lines(
            "Draft tokens per round",
            unit="suffix:tokens",
            axis="draft tokens",
            text="Length of the proposals, as chosen by the service or by requests. Rounds without a proposal count "
            "as 0. Proposals are shorter where acceptance is low, and where many sessions share a step. 0 means that "
            "drafting does not pay, or that there is no draft.",
            queries={
                "mean": mean("specd_round_draft_tokens"),
                "p90": quantiles("specd_round_draft_tokens")["p90"],
            },
        ),
        lines(
            "Accepted and wasted proposed tokens",
            unit="suffix:tokens/s",
            axis="tokens a second",
            text="Accepted tokens by source: the draft model, look-up in the session's own text, a prediction, or the "
            "form of the answer (forced). Wasted tokens were proposed and not emitted: they cost time in the workers. "
            "If most are wasted, look at the acceptance rate.",
            queries={
                "accepted, {{source}}": rate("specd_accepted_tokens_by_source_total", "source"),
                "wasted": f"{rate('specd_proposed_tokens_total')} - {rate('specd_accepted_tokens_total')}",
            },
            stacked=True,
        ),
        lines(
            "Answers in a form",
            unit="percentunit",
            axis="of the tokens",
            text="constrained: generated tokens of answers in the form of a grammar (a JSON schema, a tool call that "
            "must be made, and the like), over all generated tokens. forced: the constrained ones that were proposed "
            "because the form leaves no choice, such as the keys of an object. They come nearly for nothing, so a "
            "large part makes these answers fast.",
            queries={
                "constrained": per(rate("specd_constrained_tokens_total"), rate("specd_generated_tokens_total")),
                "forced": per(
                    rate("specd_accepted_tokens_by_source_total", of=_FORCED), rate("specd_constrained_tokens_total")
                ),
            },
        ),
        lines(
            "Round time by stage",
            unit="s",
            axis="time a round",
            text="Mean time of a round after a session's first. draft and verify: the models compute. queue: the "
            "request waits in a worker for other sessions. wire: messages travel. coordinator: the rest. verify "
            "should be most of it. A large queue means more sessions than the workers compute in one pass. A large "
            "wire means that the processes are far apart. A large coordinator means that its host is short of CPU, "
            "or that the draft is late.",
            queries={"{{stage}}": mean("specd_round_stage_seconds", "stage")},
            stacked=True,
        ),
        lines(
            "Rounds without a draft",
            unit="suffix:rounds/s",
            axis="rounds a second",
            text="Rounds that asked for a proposal and got none, by reason. The target decodes each of them alone. 0 "
            "is good. DRAFT_UNAVAILABLE: the worker is away. DRAFT_LATE: it is overloaded, or "
            "--draft-timeout-seconds is too short. DRAFT_CONTEXT_EXCEEDED: the session is longer than the draft's "
            "context.",
            queries={"{{reason}}": rate("specd_rounds_without_draft_total", "reason")},
            stacked=True,
        ),
        lines(
            "Sessions by draft",
            unit="suffix:sessions/s",
            axis="sessions a second",
            text="Sessions that begin with the present draft worker, or with the canary, a draft on trial "
            "(--canary-draft). The canary has its share (--canary-share) until it is decided, and then all sessions or "
            "none. specd_canary_state has the decision, and the log has both speeds.",
            queries={"{{draft}}": rate("specd_sessions_by_draft_total", "draft")},
            stacked=True,
        ),
        lines(
            "Cached prompt tokens",
            unit="suffix:tokens/s",
            axis="tokens a second",
            text="Prompt tokens of sessions that began, and those of them that a worker found in its prefix cache and "
            "did not compute. Expect many where sessions have several turns or share a system prompt. If they are "
            "fewer than that, raise --prefix-cache-bytes.",
            queries={
                "prompts": rate("specd_prompt_tokens_total"),
                "cached by the {{worker}}": rate("specd_reused_prompt_tokens_total", "worker"),
            },
        ),
        lines(
            "Bytes on the wire",
            unit="bytes",
            axis="bytes a round",
            text="Size of the messages between coordinator and workers. About a hundred bytes are usual. With "
            "REJECTION the draft's distributions travel too: top_k makes them smaller.",
            queries={"messages": per(rate("specd_wire_bytes_total"), rate("specd_rounds_total"))},
        ),
    )


def service() -> dashboard.Dashboard:
    """Make the dashboard of availability, requests, latency, load and memory."""
    worker = variable("worker", "label_values(specd_worker_active_sessions, instance)", label="Worker")
    capacity = f"sum (specd_capacity_bytes{MODEL})"
    return make_dashboard(
        "Service",
        "specd-service",
        "Availability, requests, latency, load and memory of the processes.",
        states(
            "Availability",
            text="Whether processes answer scrapes, and whether the coordinator has its target and its draft. While "
            "the draft is away, sessions go on with the target alone, slower. While the target is away, sessions "
            "wait for it, and new ones fail. A model that is loaded on demand is shown while it is loaded.",
            queries={
                "{{instance}} answers": f"up{COORDINATOR} or up{WORKER}",
                "{{instance}} {{model}} has its target": f"specd_target_available{MODEL}{_LOADED}",
                "{{instance}} {{model}} has its draft": f"specd_draft_available{MODEL}{_LOADED}",
            },
        ),
        lines(
            "Requests by outcome",
            unit="reqps",
            axis="requests a second",
            text="Sessions that ended, by outcome. eos, length, stop_token and stop_string are finish reasons. "
            "cancelled: the client went away. failed: see the errors.",
            queries={"{{outcome}}": f"{rate('specd_sessions_total', 'outcome')} > 0"},
            stacked=True,
        ),
        lines(
            "Errors by code",
            unit="reqps",
            axis="requests a second",
            text="Requests that ended with an error, by gRPC status code. INVALID_ARGUMENT, NOT_FOUND and ABORTED are "
            "the client's mistakes. RESOURCE_EXHAUSTED: the queue or a cache was full. No other code is normal: "
            "specd_errors_total and the log have the reason.",
            queries={"{{code}}": rate("specd_errors_total", "code", of=COORDINATOR)},
            stacked=True,
        ),
        lines(
            "Tokens",
            unit="suffix:tokens/s",
            axis="tokens a second",
            text="Generated tokens of all sessions, and prompt tokens of sessions that began, with the cached ones.",
            queries={
                "generated": rate("specd_generated_tokens_total"),
                "prompt": rate("specd_prompt_tokens_total"),
            },
        ),
        lines(
            "Time to first token",
            unit="s",
            axis="time",
            text="From the arrival of a request to its first token: time in the queue, and prefill. If it is long and "
            "requests wait, there are more of them than the machine has room for. If it is long and none wait, "
            "prompts are long.",
            queries=quantiles("specd_time_to_first_token_seconds"),
        ),
        lines(
            "Time per output token",
            unit="s",
            axis="time a token",
            text="From a session's first token to its last, over the tokens after the first. It grows with the "
            "sessions that run at the same time: --max-sessions limits them.",
            queries=quantiles("specd_time_per_output_token_seconds"),
        ),
        lines(
            "Time in the queue",
            unit="s",
            axis="time",
            text="From the arrival of a request until its session begins. It is near 0 unless more requests come than "
            "--max-sessions or the target's --cache-bytes admit.",
            queries=quantiles("specd_admission_seconds"),
        ),
        lines(
            "Sessions",
            unit="suffix:sessions",
            axis="sessions",
            text="Running sessions by state, and their limit. At the limit, new requests wait.",
            queries={
                "{{state}}": f"sum by (state) (specd_sessions_by_state{MODEL})",
                "limit": f"sum (specd_max_sessions{MODEL})",
            },
        ),
        lines(
            "Sessions by target",
            unit="suffix:sessions",
            axis="sessions",
            text="Running sessions by target. A session goes to the target where it probably ends first, and moves to "
            "another one if its own stops or is lost.",
            queries={"{{target}}": f"sum by (target) (specd_target_sessions{MODEL})"},
        ),
        lines(
            "Queue",
            unit="suffix:requests",
            axis="requests",
            text="Waiting requests, and their limit. Beyond the limit, requests get RESOURCE_EXHAUSTED. If the queue "
            "does not empty between peaks, the machine or --max-sessions is too small.",
            queries={
                "waiting": f"sum (specd_queued_requests{MODEL})",
                "limit": f"sum (specd_max_queued_requests{MODEL})",
            },
        ),
        lines(
            "Use of the target's cache",
            unit="percentunit",
            axis="of the capacity",
            text="Memory that the running sessions can grow to, as a part of the capacity. When everything is "
            "reserved, new requests wait: raise the target worker's --cache-bytes, or ask for fewer max_tokens.",
            queries={
                "reserved": per(f"sum (specd_reserved_bytes{MODEL})", capacity),
            },
        ),
        lines(
            "Batch size",
            unit="suffix:sessions",
            axis="sessions a step",
            text="Sessions that a worker computes in one pass. The nearer to the number of running sessions, the "
            "better: each pass costs nearly the same.",
            queries={"{{instance}}": mean("specd_worker_step_sessions", "instance", of=WORKER)},
        ),
        lines(
            "Step time",
            unit="s",
            axis="time a step",
            text="Time of one pass of a worker's model, for rounds or for a chunk of a prompt (prefill). It grows "
            "with the tokens in the step. If it grows without them, the machine is busy with something else, or hot.",
            queries={"{{instance}} {{kind}}": mean("specd_worker_step_seconds", "instance", "kind", of=WORKER)},
        ),
        lines(
            "Tokens per step",
            unit="suffix:tokens",
            axis="tokens a step",
            text="Tokens in one pass of a worker's model: those of the rounds of all its sessions, or a chunk of a "
            "prompt.",
            queries={"{{instance}} {{kind}}": mean("specd_worker_step_tokens", "instance", "kind", of=WORKER)},
        ),
        lines(
            "Mask time",
            unit="s",
            axis="time a request",
            text="Mean time to compute the masks of a request in a session with a grammar. A worker does that beside "
            "the pass of its model: rounds are slower only where it is longer than a step. New places of a difficult "
            "schema take milliseconds.",
            queries={"{{instance}}": mean("specd_worker_mask_seconds", "instance", of=WORKER)},
        ),
        lines(
            "Cache memory",
            unit="bytes",
            axis="memory",
            text="Memory of the caches of running sessions, which --cache-bytes limits, and of the prefix cache, "
            "which --prefix-cache-bytes limits. It is normal that the prefix cache fills up to its limit.",
            queries={
                "{{instance}} sessions": f"specd_worker_cache_bytes{WORKER}",
                "{{instance}} prefixes": f"specd_worker_prefix_cache_bytes{WORKER}",
            },
        ),
        lines(
            "MLX memory",
            unit="bytes",
            axis="memory",
            text="Memory of a worker's model and caches as MLX counts it: in use (active), and free for reuse "
            "(cached). Both must fit into the machine's memory, and on a Mac into Metal's limit for wired memory.",
            queries={"{{instance}} {{kind}}": 'specd_worker_memory_bytes{instance=~"$worker", kind!="peak"}'},
        ),
        lines(
            "Process memory",
            unit="bytes",
            axis="memory",
            text="Resident memory of the processes, on Linux only. A coordinator's grows with the sessions that it "
            "keeps, and stays below a few hundred MiB.",
            queries={
                "{{instance}}": f"process_resident_memory_bytes{COORDINATOR} or process_resident_memory_bytes{WORKER}"
            },
        ),
        variables=[worker],
    )


def main() -> None:
    """Write both files."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, made in (("speculation", speculation()), ("service", service())):
        text = JSONEncoder(sort_keys=True, indent=1).encode(made.build())
        (DIRECTORY / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
