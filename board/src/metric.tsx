// The card of a metric: its chart, the numbers as CSV, the picture as PNG.
import { useMemo, useRef } from "preact/hooks";
import { type Curve, type Curves, get, query } from "./api";
import { type Axis, Chart, FEW, type Line, smooth } from "./chart";
import type { Chosen } from "./main";
import { savePicture, saveTable } from "./save";
import { band, families } from "./seeds";

export interface Drawing {
  axis: Axis;
  /** Of the smoothing, 0 to 1. */
  weight: number;
  log: boolean;
  /** Runs that differ in their seeds alone are one line. */
  seeds: boolean;
  theme: string;
}

export function xOf(curve: Curve, axis: Axis, began: number): number[] {
  if (axis === "step") return curve.step;
  return curve.time.map((time) => (time ?? 0) - (axis === "relative" ? began : 0));
}

function lineOf({ run, colour }: Chosen, curve: Curve, axis: Axis, weight: number): Line[] {
  const x = xOf(curve, axis, run.started ?? 0);
  // A handful of points, as validation has, is not smoothed: the curve would only lag behind.
  const smoothed = weight > 0 && curve.value.length > FEW;
  const line = { label: run.name, colour, x, y: smoothed ? smooth(curve.value, weight) : curve.value };
  return smoothed ? [{ label: `${run.name} raw`, colour, x, y: curve.value, faint: true }, line] : [line];
}

function linesOf(name: string, chosen: Chosen[], data: Curves, { axis, weight, seeds }: Drawing): Line[] {
  const found: Line[] = [];
  const groups = seeds ? families(chosen) : chosen.map((one) => ({ colour: one.colour, label: one.run.name, members: [one] }));
  for (const { colour, label, members } of groups) {
    const lines = members.flatMap((one) => {
      const curve = data[one.run.id]?.[name];
      return curve ? [lineOf(one, curve, axis, weight)] : [];
    });
    if (lines.length > 1) found.push(...band(label, colour, lines.map((one) => one.at(-1)!), found.length));
    else found.push(...lines.flat());
  }
  return found;
}

export function Metric({ name, chosen, data, drawing }: { name: string; chosen: Chosen[]; data: Curves; drawing: Drawing }) {
  const card = useRef<HTMLElement>(null);
  const { axis, weight, log, seeds, theme } = drawing;
  const lines = useMemo(() => linesOf(name, chosen, data, drawing), [name, chosen, data, axis, weight, seeds]);
  const gaps = chosen.some(({ run }) => data[run.id]?.[name]?.value.includes(null));
  const table = () =>
    void get<Curves>(query("/api/curves", { run: chosen.map(({ run }) => run.id), metric: [name], whole: 1 })).then((whole) =>
      saveTable(name, chosen, whole),
    );
  return (
    <section class="card" ref={card}>
      <h3 title={name}>
        {name}
        {gaps && <span class="badge failed">not a number</span>}
      </h3>
      <Chart lines={lines} axis={axis} theme={theme} log={log} sync="curves" />
      <div class="save">
        <button type="button" title={`all points of ${name} as CSV`} onClick={table}>
          CSV
        </button>
        <button type="button" title={`this chart of ${name} as PNG`} onClick={() => savePicture(name, card.current!, lines)}>
          PNG
        </button>
      </div>
    </section>
  );
}
