// Runs that differ in their seeds alone: one mean with a band of one standard deviation.
import type { Line } from "./chart";
import type { Chosen } from "./main";

export interface Family {
  colour: string;
  label: string;
  members: Chosen[];
}

/** The chosen runs by family; a run without a configuration is one of its own. */
export function families(chosen: Chosen[]): Family[] {
  const found = new Map<string, Family>();
  for (const one of chosen) {
    const key = one.run.family ?? one.run.id;
    const family = found.get(key);
    if (family) family.members.push(one);
    else found.set(key, { colour: one.colour, label: one.run.name, members: [one] });
  }
  for (const family of found.values()) {
    if (family.members.length > 1) family.label = `${common(family.members.map(({ run }) => run.name))} (${family.members.length} runs)`;
  }
  return [...found.values()];
}

/** What names have in common at the beginning. */
function common(names: string[]): string {
  let length = 0;
  while (length < names[0].length && names.every((name) => name[length] === names[0][length])) length += 1;
  return names[0].slice(0, length).replace(/[-_/.\s]+$/, "") || names[0];
}

/** The value of a line at `x`, between its points; null outside of it. */
function at(line: Line, x: number): number | null {
  const after = line.x.findIndex((one) => one >= x);
  if (after < 0) return null;
  if (line.x[after] === x || after === 0) return line.x[after] === x ? line.y[after] : null;
  const [low, high] = [line.y[after - 1], line.y[after]];
  if (low === null || high === null) return null;
  return low + ((high - low) * (x - line.x[after - 1])) / (line.x[after] - line.x[after - 1]);
}

/** Mean of the lines, and edges one standard deviation away, at every x of any of them. `first` is the number of lines before these. */
export function band(label: string, colour: string, lines: Line[], first: number): Line[] {
  const x = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const columns = x.map((one) => lines.map((line) => at(line, one)).filter((value): value is number => value !== null));
  const means = columns.map((values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null));
  const spread = columns.map((values, i) =>
    values.length > 1 ? Math.sqrt(values.reduce((sum, one) => sum + (one - means[i]!) ** 2, 0) / (values.length - 1)) : 0,
  );
  const edge = (sign: number) => means.map((mean, i) => (mean === null ? null : mean + sign * spread[i]));
  return [
    { label, colour, x, y: means },
    { label: `${label} high`, colour, x, y: edge(1), edge: true, to: first + 2 },
    { label: `${label} low`, colour, x, y: edge(-1), edge: true },
  ];
}
