// A chart: lines over each other, or areas on top of each other. uPlot draws, this feeds it.
import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { brief, duration, number } from "./format";

export interface Line {
  label: string;
  colour: string;
  x: number[];
  y: (number | null)[];
  faint?: boolean;
  /** An edge of a band: not drawn itself. */
  edge?: boolean;
  /** Another line; what is between the two is filled. */
  to?: number;
}
export const FEW = 20;
export type Axis = "step" | "relative" | "clock";

/** A colour of the style sheet, as a canvas takes it. */
export function colour(name: string): string {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Lines of different x as uPlot wants them: one sorted x for all, gaps as undefined. */
function aligned(lines: Line[]): uPlot.AlignedData {
  const tables = lines.map((line) => {
    const order = line.x.map((_, i) => i).sort((a, b) => line.x[a] - line.x[b]);
    return [order.map((i) => line.x[i]), order.map((i) => line.y[i])] as uPlot.AlignedData;
  });
  return tables.length ? uPlot.join(tables) : [[]];
}

/** Each area begins where the one below ends. */
function stacked(data: uPlot.AlignedData): uPlot.AlignedData {
  const sums = new Array<number>(data[0].length).fill(0);
  const rows = data.slice(1).map((row) => Array.from(row, (value, i) => (sums[i] += value ?? 0)));
  return [data[0], ...rows] as uPlot.AlignedData;
}

/** The last value that is there: what a legend shows while nobody points at the chart. */
const last = <T,>(values: ArrayLike<T | null | undefined>): T | null => Array.from(values).findLast((value) => value != null) ?? null;

/** Distances between ticks of a step axis: there is no half step. */
const WHOLE = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));

/** Pixels for the texts of an axis. */
const room = (texts: string[] | null) => Math.max(44, 14 + 6.5 * Math.max(0, ...(texts ?? []).map((text) => text.length)));

/** A range for a line that is flat. */
const around = (value: number | null): [number, number] =>
  value === null ? [0, 1] : value === 0 ? [0, 1] : [value - Math.abs(value) / 10, value + Math.abs(value) / 10];

const xLabel = (axis: Axis) => (value: number) =>
  axis === "step" ? number(value) : axis === "relative" ? duration(value) : new Date(value * 1000).toLocaleTimeString("sv").slice(0, 5);

/** A logarithm exists of numbers above 0 only; the others are gaps. */
function positive(lines: Line[]): Line[] {
  return lines.map((line) => ({ ...line, y: line.y.map((value) => (value !== null && value > 0 ? value : null)) }));
}

interface ChartOptions {
  lines: Line[];
  axis: Axis;
  theme: string;
  height?: number;
  stack?: boolean;
  sync?: string;
  unit?: string;
  log?: boolean;
}

export function Chart(props: ChartOptions) {
  const place = useRef<HTMLDivElement>(null);
  const { axis, theme, stack } = props;
  const log = Boolean(props.log) && !stack && props.lines.some((line) => line.y.some((value) => value !== null && value > 0));
  const lines = useMemo(() => (log ? positive(props.lines) : props.lines), [props.lines, log]);
  useEffect(() => {
    const root = place.current!;
    const plain = aligned(lines);
    const data = stack ? stacked(plain) : plain;
    const [axisColour, grid] = [colour("--quiet"), colour("--line")];
    const show = xLabel(axis);
    const shared = { stroke: axisColour, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui", gap: 4 };
    const options: uPlot.Options = {
      width: Math.max(160, root.clientWidth),
      height: props.height ?? 190,
      padding: [10, 10, 0, 0],
      cursor: { y: false, sync: props.sync ? { key: props.sync } : undefined, points: { size: 6 }, drag: { x: true, y: false } },
      scales: {
        x: { time: false },
        y: log
          ? { distr: 3, range: (_, low, high) => uPlot.rangeLog(low, high, 10, true) }
          : { range: (_, low, high) => (stack ? [0, high * 1.05] : low === high ? around(low) : uPlot.rangeNum(low, high, 0.1, true)) },
      },
      axes: [
        { ...shared, size: 24, values: (_, ticks) => ticks.map(show), incrs: axis === "step" ? WHOLE : undefined },
        { ...shared, size: (_, texts) => room(texts), values: (_, ticks) => ticks.map((one) => (one === null ? "" : number(one))) },
      ],
      legend: { show: true, live: true, markers: { width: 0, fill: (_, i) => lines[i - 1]?.colour ?? "" } },
      series: [
        { label: axis === "step" ? "step" : "time", value: (_, one) => (plain[0].length ? show(one ?? last(plain[0])!) : "") },
        ...lines.map((line, i) => ({
          label: brief(line.label),
          stroke: line.edge ? "transparent" : line.colour,
          width: line.faint ? 1 : 1.6,
          alpha: line.faint ? 0.25 : 1,
          class: line.faint || line.edge ? "faint" : undefined,
          fill: stack ? `${line.colour}66` : undefined,
          spanGaps: true,
          points: { show: line.x.length <= FEW && !line.edge, size: 5, fill: line.colour },
          value: (_: uPlot, __: unknown, ___: number, at: number | null) =>
            `${number((at === null ? last(plain[i + 1]) : plain[i + 1][at]) ?? null)}${props.unit ?? ""}`,
        })),
      ],
      // Painted from the top of the pile down, so that lower areas stay visible.
      bands: stack
        ? lines.slice(1).map((_, i) => ({ series: [i + 2, i + 1] as [number, number] }))
        : lines.flatMap((line, i) => (line.to === undefined ? [] : [{ series: [i + 1, line.to + 1] as [number, number], fill: `${line.colour}30` }])),
    };
    const chart = new uPlot(options, data, root);
    const resize = new ResizeObserver(() => chart.setSize({ width: Math.max(160, root.clientWidth), height: props.height ?? 190 }));
    resize.observe(root);
    return () => {
      resize.disconnect();
      chart.destroy();
    };
  }, [lines, axis, theme, stack, log, props.height]);
  return <div class="chart" ref={place} />;
}

/** Exponential moving average that starts unbiased; gaps stay gaps. */
export function smooth(values: (number | null)[], weight: number): (number | null)[] {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
