"""Writes the dashboards as Grafana reads them: python -m deploy.grafana.generate.

Every panel says what it shows, what is good, and what to do if it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders import dashboard, prometheus, statetimeline, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

DIRECTORY = Path(__file__).parent / "dashboards"

_COLUMNS = 24  # of Grafana's grid
_PROMETHEUS = DataSourceRef(type_val="prometheus", uid="prometheus")
_STATES = {
    "0": ValueMappingResult(text="away", color="semi-dark-red"),
    "1": ValueMappingResult(text="there", color="semi-dark-green"),
}

COORDINATOR = '{instance=~"$coordinator"}'
WORKER = '{instance=~"$worker"}'
# From 8 on, places are rare, and would hide the others.
FIRST_PLACES = '{instance=~"$coordinator", position=~"[0-7]"}'

Panel = TypeVar("Panel", timeseries.Panel, statetimeline.Panel)


def lines(
    title: str, *, unit: str, axis: str, text: str, queries: dict[str, str], stacked: bool = False
) -> timeseries.Panel:
    """Make a panel of lines over time, a third of the width; `queries` are expressions by legend."""
    panel = timeseries.Panel().title(title).description(text).span(_COLUMNS // 3).height(8)
    panel.unit(unit).axis_label(axis).axis_soft_min(0)
    panel.line_width(1.5).fill_opacity(40 if stacked else 6).show_points(VisibilityMode.NEVER)
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL).group("all"))
    panel.legend(
        VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    )
    panel.tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    return _with_queries(panel, queries)


def states(title: str, *, text: str, queries: dict[str, str]) -> statetimeline.Panel:
    """Make a panel of what is there, 1, and what is away, 0, over the whole width."""
    panel = statetimeline.Panel().title(title).description(text).span(_COLUMNS).height(6)
    panel.unit("bool_yes_no").mappings([ValueMap(_STATES)])
    return _with_queries(panel, queries)


def _with_queries(panel: Panel, queries: dict[str, str]) -> Panel:
    panel.datasource(_PROMETHEUS)
    for ref_id, (legend, expression) in zip(ascii_uppercase, queries.items(), strict=False):
        panel.with_target(prometheus.Dataquery().ref_id(ref_id).expr(expression).legend_format(legend).range())
    return panel


def variable(name: str, query: str, *, label: str) -> dashboard.QueryVariable:
    """Make a template variable: all values of a query, of which a reader can choose some."""
    every = VariableOption(selected=True, text="All", value="$__all")
    made = dashboard.QueryVariable(name).label(label).query(query).datasource(_PROMETHEUS).current(every)
    made.multi(True).include_all(True).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    return made.sort(VariableSort.ALPHABETICAL_ASC)


def rate(counter: str, *by: str, of: str = COORDINATOR, over: str = "$__rate_interval") -> str:
    """Return what a counter rises by a second, over all coordinators, or workers, that are chosen."""
    return f"sum by ({', '.join(by)}) (rate({counter}{of}[{over}]))"


def per(numerator: str, denominator: str) -> str:
    """Return a quotient, which has no value while there is nothing to divide by."""
    return f"{numerator} / ({denominator} > 0)"


def mean(histogram: str, *by: str, of: str = COORDINATOR) -> str:
    """Return the mean of what a histogram counts."""
    return per(rate(f"{histogram}_sum", *by, of=of), rate(f"{histogram}_count", *by, of=of))


def quantiles(histogram: str) -> dict[str, str]:
    """Return the median, and what one in ten and one in a hundred exceed."""
    buckets = rate(f"{histogram}_bucket", "le")
    return {f"p{round(100 * q)}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.99)}


def speculation() -> dashboard.Dashboard:
    """Make the dashboard of how well drafting goes, and what it brings."""
    return _dashboard(
        "Speculation",
        "specd-speculation",
        "How much of what the draft proposes the target takes, and how much faster that is.",
        lines(
            "Acceptance rate",
            unit="percentunit",
            axis="accepted / proposed",
            text="Part of the draft's tokens that the target accepts. 60 % and more is good for a draft a tenth of the "
            "target's size. It depends on the text and on the temperature. If it is low for all that you serve, try a "
            "draft of the target's family that is larger, or trained on such text.",
            queries={
                "{{instance}}": f"instance:specd_accepted_tokens_per_proposed_tokens:ratio_rate1m{COORDINATOR}",
            },
        ),
        lines(
            "Acceptance by place in the proposal",
            unit="percentunit",
            axis="accepted / proposed",
            text="Part of the draft's tokens in each place of a proposal, from 0, that are accepted, which takes that "
            "all before are too. With a fixed num_draft_tokens it falls from place to place, and where it falls to "
            "nothing, fewer are better. Where the service chooses, it goes far only where the draft is sure, and "
            "places are alike.",
            queries={
                "{{position}}": per(
                    rate("specd_accepted_tokens_by_position_total", "position", of=FIRST_PLACES, over="1m"),
                    rate("specd_proposed_tokens_by_position_total", "position", of=FIRST_PLACES, over="1m"),
                )
            },
        ),
        lines(
            "Acceptance length",
            unit="suffix:tokens",
            axis="tokens a round",
            text="Tokens that a round emits, the target's own included: 1 is the target alone. The more, the fewer "
            "passes of the target.",
            queries={"{{instance}}": f"instance:specd_generated_tokens_per_rounds:ratio_rate1m{COORDINATOR}"},
        ),
        lines(
            "Speed-up against the target alone",
            unit="suffix:times",
            axis="times as fast",
            text="How many times as long the target alone would have taken for the same tokens, by what it takes in "
            "rounds without a draft. Below 1, drafting costs more than it brings: the service then stops it by itself, "
            "but for a fixed num_draft_tokens.",
            queries={"{{instance}}": f"instance:specd_target_only_seconds_per_round_seconds:ratio_rate1m{COORDINATOR}"},
        ),
        lines(
            "Draft tokens a round",
            unit="suffix:tokens",
            axis="draft tokens",
            text="How far the draft goes in a round, as the service chooses or requests say, rounds without a draft "
            "included. It is less where acceptance is low, and where many sessions share a step. At 0, drafting does "
            "not pay, or there is no draft.",
            queries={
                "mean": mean("specd_round_draft_tokens"),
                "p90": quantiles("specd_round_draft_tokens")["p90"],
            },
        ),
        lines(
            "Draft tokens, accepted and wasted",
            unit="suffix:tokens/s",
            axis="tokens a second",
            text="What becomes of the draft's tokens. Wasted ones cost time in both workers. If most are wasted, see "
            "the acceptance rate.",
            queries={
                "accepted": rate("specd_accepted_tokens_total"),
                "wasted": f"{rate('specd_proposed_tokens_total')} - {rate('specd_accepted_tokens_total')}",
            },
            stacked=True,
        ),
        lines(
            "Where a round's time goes",
            unit="s",
            axis="time a round",
            text="The mean round after a session's first: computing in the draft and in the target (verify), waiting "
            "in the workers for other sessions (queue), on the way between the processes (wire), and in the "
            "coordinator. Verify should be most of it. Much queue: more sessions than the workers can compute in one "
            "pass; much wire: they are far apart; much coordinator: its host is "
            "short of CPU, or it waits for a draft that is late.",
            queries={"{{stage}}": mean("specd_round_stage_seconds", "stage")},
            stacked=True,
        ),
        lines(
            "Rounds without a draft",
            unit="suffix:rounds/s",
            axis="rounds a second",
            text="Rounds that wanted a proposal and got none, by reason. None is good: each is decoded by the target "
            "alone. DRAFT_UNAVAILABLE: the worker is away; DRAFT_LATE: it is overloaded, or --draft-timeout-seconds is "
            "too short; DRAFT_CONTEXT_EXCEEDED: the session is longer than the draft can go.",
            queries={"{{reason}}": rate("specd_rounds_without_draft_total", "reason")},
            stacked=True,
        ),
        lines(
            "Going ahead: hits",
            unit="percentunit",
            axis="rounds",
            text="Of all rounds, those in which the draft was let go on while the target verified, and those whose "
            "proposal was there already because it had guessed right. The nearer the two, the better. None are usual "
            "where several sessions run, or where both models share cores or memory.",
            queries={
                "gone ahead": per(rate("specd_rounds_gone_ahead_total"), rate("specd_rounds_total")),
                "hits": per(rate("specd_rounds_ahead_total"), rate("specd_rounds_total")),
            },
        ),
        lines(
            "Going ahead: time saved",
            unit="s",
            axis="time a round",
            text="What drafting the proposals that were there already would have taken, over all rounds. That much "
            "longer a round would be without, less what the verify takes longer beside a draft that is busy.",
            queries={"saved": per(rate("specd_ahead_saved_seconds_total"), rate("specd_rounds_total"))},
        ),
        lines(
            "Prompt tokens that were cached",
            unit="suffix:tokens/s",
            axis="tokens a second",
            text="Tokens of the prompts of sessions that began, and those of them that a worker had in its prefix "
            "cache and did not compute. They are many where sessions have many turns, or share a system prompt. If "
            "they are fewer than they should be, raise --prefix-cache-bytes.",
            queries={
                "prompts": rate("specd_prompt_tokens_total"),
                "cached by the {{worker}}": rate("specd_reused_prompt_tokens_total", "worker"),
            },
        ),
        lines(
            "Bytes on the wire",
            unit="bytes",
            axis="bytes a round",
            text="Size of the messages between coordinator and workers. About a hundred bytes are usual; with "
            "REJECTION the draft's distributions travel too, and sampling with top_k makes them smaller.",
            queries={"messages": per(rate("specd_wire_bytes_total"), rate("specd_rounds_total"))},
        ),
    )


def service() -> dashboard.Dashboard:
    """Make the dashboard of what clients get, and what the processes have to do for it."""
    worker = variable("worker", "label_values(specd_worker_active_sessions, instance)", label="Worker")
    room = f"sum (specd_capacity_tokens{COORDINATOR})"
    return _dashboard(
        "Service",
        "specd-service",
        "What clients get, how loaded the processes are, and whether all of them are there.",
        states(
            "What is there",
            text="Whether processes answer scrapes, and whether the coordinator has its target and its draft. While "
            "the draft is away, service is degraded: sessions go on with the target alone, slower. While the target is "
            "away, sessions wait for it, and new ones fail.",
            queries={
                "{{instance}} answers": f"up{COORDINATOR} or up{WORKER}",
                "{{instance}} has its target": f"specd_target_available{COORDINATOR}",
                "{{instance}} has its draft": f"specd_draft_available{COORDINATOR}",
            },
        ),
        lines(
            "Requests by outcome",
            unit="reqps",
            axis="requests a second",
            text="Sessions that ended, by what ended them. eos, length, stop_token and stop_string are the ways to "
            "finish; cancelled: the client went away; failed: see the errors.",
            queries={"{{outcome}}": f"{rate('specd_sessions_total', 'outcome')} > 0"},
            stacked=True,
        ),
        lines(
            "Errors by code",
            unit="reqps",
            axis="requests a second",
            text="Requests that ended with an error, by gRPC status code. INVALID_ARGUMENT, NOT_FOUND and ABORTED are "
            "the client's; RESOURCE_EXHAUSTED were turned away; all else should not be: the reason is in "
            "specd_errors_total and in the log.",
            queries={"{{code}}": rate("specd_errors_total", "code")},
            stacked=True,
        ),
        lines(
            "Tokens",
            unit="suffix:tokens/s",
            axis="tokens a second",
            text="Tokens that all sessions together get, and those of the prompts of sessions that began, cached ones "
            "included.",
            queries={
                "generated": rate("specd_generated_tokens_total"),
                "prompt": rate("specd_prompt_tokens_total"),
            },
        ),
        lines(
            "Time to first token",
            unit="s",
            axis="time",
            text="From the arrival of a request to its first token: waiting for room, and computing the prompt. If it "
            "is long and requests wait, there are more of them than the machine has room for; if none wait, prompts "
            "are long.",
            queries=quantiles("specd_time_to_first_token_seconds"),
        ),
        lines(
            "Time per output token",
            unit="s",
            axis="time a token",
            text="Of a session: first to last token, over the tokens after the first. It grows with the sessions that "
            "run at the same time: --max-sessions limits them.",
            queries=quantiles("specd_time_per_output_token_seconds"),
        ),
        lines(
            "Waiting for room",
            unit="s",
            axis="time",
            text="From the arrival of a request until its session began to run. Near 0 unless there are more requests "
            "than --max-sessions or the target's --cache-bytes let run.",
            queries=quantiles("specd_admission_seconds"),
        ),
        lines(
            "Sessions",
            unit="suffix:sessions",
            axis="sessions",
            text="Sessions that run, and how many may. At the limit, others wait.",
            queries={
                "{{state}}": f"sum by (state) (specd_sessions_by_state{COORDINATOR})",
                "limit": f"sum (specd_max_sessions{COORDINATOR})",
            },
        ),
        lines(
            "Queue",
            unit="suffix:requests",
            axis="requests",
            text="Requests that wait for room, and how many may. Beyond the limit they are turned away with "
            "RESOURCE_EXHAUSTED. If it does not empty between peaks, the machine is too small, or --max-sessions is.",
            queries={
                "waiting": f"sum (specd_queued_requests{COORDINATOR})",
                "limit": f"sum (specd_max_queued_requests{COORDINATOR})",
            },
        ),
        lines(
            "Room in the target's cache",
            unit="percentunit",
            axis="of the room",
            text="What the sessions under way hold of the tokens that there is room for, and what they can come to, "
            "for which room is kept. When that is all, others wait: raise the target worker's --cache-bytes, or ask "
            "for fewer max_tokens.",
            queries={
                "held": per(f"sum (specd_session_tokens{COORDINATOR})", room),
                "kept": per(f"sum (specd_reserved_tokens{COORDINATOR})", room),
            },
        ),
        lines(
            "Batch rows",
            unit="suffix:sessions",
            axis="sessions a step",
            text="Sessions that a worker computes in one pass. The more of those that run, the better: each pass costs "
            "nearly the same.",
            queries={"{{instance}}": mean("specd_worker_step_sessions", "instance", of=WORKER)},
        ),
        lines(
            "Step time",
            unit="s",
            axis="time a step",
            text="One pass of a worker's model, for rounds or for a piece of a prompt (prefill). It grows with the "
            "tokens in it. If it grows without, the machine has something else to do, or is too hot.",
            queries={"{{instance}} {{kind}}": mean("specd_worker_step_seconds", "instance", "kind", of=WORKER)},
        ),
        lines(
            "Tokens a step",
            unit="suffix:tokens",
            axis="tokens a step",
            text="Tokens in a pass of a worker's model: one for each draft token and session, or a piece of a prompt.",
            queries={"{{instance}} {{kind}}": mean("specd_worker_step_tokens", "instance", "kind", of=WORKER)},
        ),
        lines(
            "Cache",
            unit="bytes",
            axis="memory",
            text="Memory of the caches of running sessions, which --cache-bytes limits, and of those that ended ones "
            "left (prefixes), which --prefix-cache-bytes limits. Prefixes grow up to their limit, as they should.",
            queries={
                "{{instance}} sessions": f"specd_worker_cache_bytes{WORKER}",
                "{{instance}} prefixes": f"specd_worker_prefix_cache_bytes{WORKER}",
            },
        ),
        lines(
            "MLX memory",
            unit="bytes",
            axis="memory",
            text="Memory of a worker's models and caches as MLX counts it: in use (active), and kept to be used again "
            "(cached). It must fit into the machine's, or on a Mac into what Metal may wire.",
            queries={"{{instance}} {{kind}}": 'specd_worker_memory_bytes{instance=~"$worker", kind!="peak"}'},
        ),
        lines(
            "Process memory",
            unit="bytes",
            axis="memory",
            text="Resident memory of the processes, where they run on Linux. A coordinator's grows with the sessions "
            "that it keeps, and stays below a few hundred MiB.",
            queries={
                "{{instance}}": f"process_resident_memory_bytes{COORDINATOR} or process_resident_memory_bytes{WORKER}"
            },
        ),
        variables=[worker],
    )


def _dashboard(
    title: str,
    uid: str,
    text: str,
    *panels: timeseries.Panel | statetimeline.Panel,
    variables: Sequence[dashboard.QueryVariable] = (),
) -> dashboard.Dashboard:
    made = dashboard.Dashboard(f"specd: {title}").uid(uid).description(text).tags(["specd"])
    made.time("now-1h", "now").refresh("10s").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR).readonly()
    made.with_variable(variable("model", "label_values(specd_model_info, target)", label="Model"))
    # The coordinators that serve these models.
    coordinators = 'label_values(specd_model_info{target=~"$model"}, instance)'
    made.with_variable(variable("coordinator", coordinators, label="Coordinator"))
    for own in variables:
        made.with_variable(own)
    for number, panel in enumerate(panels, start=1):
        made.with_panel(panel.id(number))
    return made


def main() -> None:
    """Write both files."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, made in (("speculation", speculation()), ("service", service())):
        text = JSONEncoder(sort_keys=True, indent=1).encode(made.build())
        (DIRECTORY / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
