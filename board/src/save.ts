// Files to take away: a chart as PNG, its numbers as CSV.
import type { Curves } from "./api";
import { colour, type Line } from "./chart";
import type { Chosen } from "./main";

function offer(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name.replace(/[^\w.@-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A field of CSV. A spreadsheet computes what begins like a formula, so a text of that kind gets an apostrophe. */
function field(value: string | number | null): string {
  if (typeof value !== "string") return value === null ? "" : String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** One line per point: run, metric, step, time, value. */
export function saveTable(metric: string, chosen: Chosen[], curves: Curves): void {
  const lines = ["run,metric,step,time,value"];
  for (const { run } of chosen) {
    const curve = curves[run.id]?.[metric];
    curve?.step.forEach((step, i) => lines.push([run.name, metric, step, curve.time[i], curve.value[i]].map(field).join(",")));
  }
  offer(`${metric}.csv`, new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
}

/** The chart of a card with its title, and a legend below. */
export function savePicture(title: string, card: HTMLElement, lines: Line[]): void {
  const drawn = card.querySelector("canvas");
  if (!drawn) return;
  const scale = devicePixelRatio;
  const named = lines.filter((line) => !line.faint && !line.edge);
  const picture = document.createElement("canvas");
  picture.width = drawn.width;
  picture.height = drawn.height + (36 + 18 * named.length) * scale;
  const pen = picture.getContext("2d")!;
  pen.fillStyle = colour("--card");
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.drawImage(drawn, 0, 28 * scale);
  pen.scale(scale, scale);
  pen.fillStyle = colour("--text");
  pen.font = "600 13px system-ui";
  pen.fillText(title, 12, 20);
  pen.font = "12px system-ui";
  named.forEach((line, i) => {
    const y = 28 + drawn.height / scale + 14 + 18 * i;
    pen.fillStyle = line.colour;
    pen.fillRect(12, y - 8, 10, 10);
    pen.fillStyle = colour("--text");
    pen.fillText(line.label, 28, y);
  });
  picture.toBlob((content) => content && offer(`${title}.png`, content), "image/png");
}
