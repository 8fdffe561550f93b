// Curves of any metric, the chosen runs over each other; where the time of a step goes; memory.
import { useMemo } from "preact/hooks";
import { type Curve, type Curves, query, useAnswer } from "./api";
import { type Axis, Chart, FEW, type Line, smooth } from "./chart";
import type { Chosen } from "./main";
import { Choice, COLOURS, Empty, Problem, RunTitle, Search } from "./parts";
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
const MOST = 24;
const VIEWS = [
  ["overview", "Overview"],
  ["phases", "Time per phase"],
  ["memory", "Memory"],
  ["all", "All metrics"],
] as const;
const AXES = [
  ["step", "Step"],
  ["relative", "Time"],
  ["clock", "Clock"],
] as const;
type View = (typeof VIEWS)[number][0];

function pick(names: string[], view: View, find: string): string[] {
  if (find) {
    const words = find.toLowerCase().split(/\s+/);
    return names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  }
  if (view === "overview") return FIRST.flatMap((form) => names.filter((name) => form.test(name)));
  if (view === "phases") return names.filter((name) => PHASE.test(name) && name !== "timing_s/step");
  if (view === "memory") return names.filter((name) => MEMORY.test(name));
  return names;
}

export function CurvesPage({ chosen, theme }: { chosen: Chosen[]; theme: string }) {
  const { settings } = useRoute();
  const view = (settings.view ?? "overview") as View;
  const axis = (settings.x ?? "step") as Axis;
  const weight = Number(settings.smooth ?? 0) / 100;
  const find = settings.find ?? "";
  const ids = chosen.map(({ run }) => run.id);
  const fresh = chosen.map(({ run }) => run.version).join();
  const names = useNames(chosen);
  const wanted = pick(names, view, find);
  const shown = wanted.slice(0, MOST);
  const stack = view === "phases" && !find;
  const path = shown.length && ids.length ? query("/api/curves", { run: ids, metric: shown, points: 600, stacked: stack ? 1 : undefined }) : null;
  const { data, error } = useAnswer<Curves>(path, 0, fresh);
  return (
    <>
      <div class="bar">
        <Choice of={VIEWS} value={view} onChange={(one) => set({ view: one, find: "" }, true)} label="view" />
        <Search value={find} onChange={(text) => set({ find: text }, true)} placeholder="Find metrics: entropy, val-core …" />
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
        <Choice of={AXES} value={axis} onChange={(one) => set({ x: one }, true)} label="horizontal axis" />
      </div>
      <Problem text={error} />
      {names.length > 0 && !wanted.length && (
        <Empty title={find ? "No metric matches" : view === "memory" ? "No memory was measured" : "Nothing was measured yet"}>
          {find ? "Metrics are named like critic/score/mean; parts of names will do." : "The run has not logged such metrics."}
        </Empty>
      )}
      {data && stack && chosen.map((one) => <Phases key={one.run.id} one={one} curves={data[one.run.id] ?? {}} axis={axis} theme={theme} />)}
      {data && !stack && (
        <div class="charts">
          {shown.map((name) => (
            <Metric key={name} name={name} chosen={chosen} data={data} axis={axis} weight={weight} theme={theme} />
          ))}
        </div>
      )}
      {wanted.length > MOST && !stack && (
        <p class="quiet more">
          {MOST} of {wanted.length} metrics are drawn. Find the others by a part of their name.
        </p>
      )}
    </>
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

function xOf(curve: Curve, axis: Axis, began: number): number[] {
  if (axis === "step") return curve.step;
  return curve.time.map((time) => (time ?? 0) - (axis === "relative" ? began : 0));
}

function Metric(props: { name: string; chosen: Chosen[]; data: Curves; axis: Axis; weight: number; theme: string }) {
  const { name, chosen, data, axis, weight } = props;
  const lines = useMemo(() => {
    const found: Line[] = [];
    for (const { run, colour } of chosen) {
      const curve = data[run.id]?.[name];
      if (!curve) continue;
      const x = xOf(curve, axis, run.started ?? 0);
      // A handful of points, as validation has, is not smoothed: the curve would only lag behind.
      const smoothed = weight > 0 && curve.value.length > FEW;
      if (smoothed) found.push({ label: `${run.name} raw`, colour, x, y: curve.value, faint: true });
      found.push({ label: run.name, colour, x, y: smoothed ? smooth(curve.value, weight) : curve.value });
    }
    return found;
  }, [name, chosen, data, axis, weight]);
  const gaps = chosen.some(({ run }) => data[run.id]?.[name]?.value.includes(null));
  return (
    <section class="card">
      <h3 title={name}>
        {name}
        {gaps && <span class="badge failed">not a number</span>}
      </h3>
      <Chart lines={lines} axis={axis} theme={props.theme} sync="curves" />
    </section>
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
