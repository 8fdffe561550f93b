// Curves of any metric, the chosen runs over each other; where the time of a step goes; memory.
import { useMemo, useState } from "preact/hooks";
import { type Curve, type Curves, query, useAnswer } from "./api";
import { type Axis, Chart } from "./chart";
import { Distributions } from "./distributions";
import type { Chosen } from "./main";
import { type Drawing, Metric, xOf } from "./metric";
import { Border, Choice, COLOURS, Damaged, Empty, Problem, RunTitle, Search } from "./parts";
import { set, useRoute } from "./route";

const FIRST = [
  /^critic\/score\/mean$/,
  /^(train|val)\/loss$/,
  /^val-core\//,
  /^response_length\/mean$/,
  /^actor\/entropy$/,
  /^actor\/(kl_loss|reward_kl_penalty|ppo_kl)$/,
  /^actor\/grad_norm$/,
  /^actor\/pg_clipfrac$/,
  /^training\/rollout_probs_diff_mean$/,
  /^perf\/throughput$/,
  /^timing_s\/step$/,
  /^response_length\/clip_ratio$/,
];
const PHASE = /^timing_s\/[^/]+$/;
const MEMORY = /memory|_gb$|cache_use/i;
const PAGE = 24;
const VIEWS = [
  ["overview", "Overview"],
  ["phases", "Time per phase"],
  ["memory", "Memory"],
  ["distributions", "Distributions"],
  ["all", "All metrics"],
] as const;
const AXES = [
  ["step", "Step"],
  ["relative", "Time"],
  ["clock", "Clock"],
] as const;
type View = (typeof VIEWS)[number][0];

/** Whether a name is what was typed: a regular expression where it has signs of one, else words in any order. */
function matcher(find: string): ((name: string) => boolean) | string {
  if (!/[\\^$.*+?()[\]{}|]/.test(find)) {
    const words = find.toLowerCase().split(/\s+/);
    return (name) => words.every((word) => name.toLowerCase().includes(word));
  }
  try {
    const form = new RegExp(find, "i");
    return (name) => form.test(name);
  } catch (problem) {
    return (problem as Error).message;
  }
}

function pick(names: string[], view: View): string[] {
  if (view === "overview") return FIRST.flatMap((form) => names.filter((name) => form.test(name)));
  if (view === "phases") return names.filter((name) => PHASE.test(name) && name !== "timing_s/step");
  return names.filter((name) => MEMORY.test(name));
}

export function CurvesPage({ chosen, theme }: { chosen: Chosen[]; theme: string }) {
  const { settings } = useRoute();
  const view = (settings.view ?? "overview") as View;
  const axis = (settings.x ?? "step") as Axis;
  const find = settings.find ?? "";
  const drawing = { axis, weight: Number(settings.smooth ?? 0) / 100, log: settings.log === "1", seeds: settings.seeds === "1", theme };
  const names = useNames(chosen);
  const matches = find ? matcher(find) : null;
  const wanted = typeof matches === "function" ? names.filter(matches) : view === "all" ? names : pick(names, view);
  const broken = chosen.flatMap(({ run }) => run.damaged.map((file) => `${run.name}: ${file}`));
  const toggle = (name: "log" | "seeds", label: string, title: string) => (
    <button type="button" title={title} aria-pressed={settings[name] === "1"} onClick={() => set({ [name]: settings[name] === "1" ? "" : "1" }, true)}>
      {label}
    </button>
  );
  const shown = () => {
    if (typeof matches === "string") return <Problem text={`This is not a regular expression: ${matches}`} />;
    if (view === "distributions" && !find) return <Distributions chosen={chosen} />;
    if (names.length > 0 && !wanted.length) return <NoMetric find={find} view={view} />;
    if (view === "phases" && !find) return <PhasesOf names={wanted} chosen={chosen} axis={axis} theme={theme} />;
    if (view === "all" && !find) return <Sections names={names} chosen={chosen} drawing={drawing} />;
    return <Charts names={wanted} chosen={chosen} drawing={drawing} />;
  };
  return (
    <>
      <div class="bar">
        <Choice of={VIEWS} value={view} onChange={(one) => set({ view: one, find: "" }, true)} label="view" />
        <Search value={find} onChange={(text) => set({ find: text }, true)} placeholder="Find metrics: entropy, ^actor/" />
        <span class="gap" />
        <label class="slider">
          Smoothing
          <input
            type="range"
            min="0"
            max="99"
            value={settings.smooth ?? "0"}
            onInput={(event) => set({ smooth: event.currentTarget.value }, true)}
          />
        </label>
        <div class="choice" role="group" aria-label="drawing">
          {toggle("log", "Log", "logarithmic vertical axis")}
          {toggle("seeds", "Seeds", "mean and standard deviation of runs that differ in their seeds alone")}
        </div>
        <Choice of={AXES} value={axis} onChange={(one) => set({ x: one }, true)} label="horizontal axis" />
      </div>
      <Damaged files={broken} />
      {shown()}
    </>
  );
}

function NoMetric({ find, view }: { find: string; view: View }) {
  const title = find ? "No metric matches" : view === "memory" ? "No memory was measured" : "Nothing was measured yet";
  return (
    <Empty title={title}>
      {find ? "Metrics are named like critic/score/mean; parts of names or a regular expression will do." : "The run has not logged such metrics."}
    </Empty>
  );
}

function useNames(chosen: Chosen[]): string[] {
  // Runs of one experiment have the same metrics; the first four tell enough.
  const asked = [0, 1, 2, 3].map((i) =>
    useAnswer<{ metrics: string[] }>(chosen[i] ? `/api/runs/${chosen[i].run.id}/metrics` : null, 0, chosen[i]?.run.version),
  );
  const all = asked.flatMap(({ data }) => data?.metrics ?? []);
  return useMemo(() => [...new Set(all)].sort(), [all.join("\n")]);
}

function useCurves(names: string[], chosen: Chosen[], stacked: boolean) {
  const ids = chosen.map(({ run }) => run.id);
  const fresh = chosen.map(({ run }) => run.version).join();
  const path = names.length && ids.length ? query("/api/curves", { run: ids, metric: names, points: 600, stacked: stacked ? 1 : undefined }) : null;
  return useAnswer<Curves>(path, 0, fresh);
}

/** Metrics by the first part of their names. Only open sections are asked for. */
function Sections({ names, chosen, drawing }: { names: string[]; chosen: Chosen[]; drawing: Drawing }) {
  const { settings } = useRoute();
  const open = new Set((settings.open ?? "").split(",").filter(Boolean));
  const sections = new Map<string, string[]>();
  for (const name of names) {
    const section = name.includes("/") ? name.split("/", 1)[0] : "other";
    sections.set(section, [...(sections.get(section) ?? []), name]);
  }
  const turn = (section: string) => {
    const next = new Set(open);
    if (!next.delete(section)) next.add(section);
    set({ open: [...next].join(",") }, true);
  };
  return (
    <>
      {[...sections].map(([section, members]) => (
        <section class="metrics" key={section}>
          <h2>
            <button type="button" aria-expanded={open.has(section)} onClick={() => turn(section)}>
              {section} <span class="quiet">{members.length}</span>
            </button>
          </h2>
          {open.has(section) && <Charts names={members} chosen={chosen} drawing={drawing} />}
        </section>
      ))}
    </>
  );
}

/** Charts of these metrics, a page at a time. */
function Charts({ names, chosen, drawing }: { names: string[]; chosen: Chosen[]; drawing: Drawing }) {
  const [page, setPage] = useState(0);
  const pages = Math.max(1, Math.ceil(names.length / PAGE));
  const at = Math.min(page, pages - 1);
  const shown = names.slice(at * PAGE, (at + 1) * PAGE);
  const { data, error } = useCurves(shown, chosen, false);
  return (
    <>
      <Problem text={error} />
      {data && (
        <div class="charts">
          {shown.map((name) => (
            <Border key={name}>
              <Metric name={name} chosen={chosen} data={data} drawing={drawing} />
            </Border>
          ))}
        </div>
      )}
      {pages > 1 && (
        <div class="pages">
          <button type="button" disabled={at === 0} onClick={() => setPage(at - 1)} aria-label="previous metrics">
            ‹
          </button>
          <span class="quiet">
            {at * PAGE + 1} to {at * PAGE + shown.length} of {names.length} metrics
          </span>
          <button type="button" disabled={at === pages - 1} onClick={() => setPage(at + 1)} aria-label="next metrics">
            ›
          </button>
        </div>
      )}
    </>
  );
}

function PhasesOf({ names, chosen, axis, theme }: { names: string[]; chosen: Chosen[]; axis: Axis; theme: string }) {
  const { data, error } = useCurves(names.slice(0, PAGE), chosen, true);
  return (
    <>
      <Problem text={error} />
      {data &&
        chosen.map((one) => (
          <Border key={one.run.id}>
            <Phases one={one} curves={data[one.run.id] ?? {}} axis={axis} theme={theme} />
          </Border>
        ))}
    </>
  );
}

function Phases({ one, curves, axis, theme }: { one: Chosen; curves: Record<string, Curve>; axis: Axis; theme: string }) {
  const lines = useMemo(() => {
    const mean = (curve: Curve) => curve.value.reduce<number>((sum, value) => sum + (value ?? 0), 0) / curve.value.length;
    return Object.entries(curves)
      .sort(([, a], [, b]) => mean(b) - mean(a))
      .map(([name, curve], i) => ({
        label: name.replace("timing_s/", ""),
        colour: COLOURS[i % COLOURS.length],
        x: xOf(curve, axis, one.run.started ?? 0),
        y: curve.value,
      }));
  }, [curves, axis]);
  if (!lines.length) return <Empty title={`${one.run.name}: no phase was timed yet`} />;
  return (
    <section class="card wide">
      <RunTitle run={one.run} colour={one.colour} />
      <p class="quiet">Seconds per step, one phase on top of the other; the largest is at the bottom.</p>
      <Chart lines={lines} axis={axis} theme={theme} height={340} stack unit=" s" />
    </section>
  );
}
