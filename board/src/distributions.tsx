// Scores and lengths of the kept samples by step: one column per step, darker where more samples are.
import { useAnswer } from "./api";
import { number, plural } from "./format";
import type { Chosen } from "./main";
import { Choice, Damaged, Empty, Problem, RunTitle } from "./parts";
import { set, useRoute } from "./route";

interface Histogram {
  edges: number[];
  counts: number[][];
}
interface Histograms {
  steps: number[];
  damaged: string[];
  left: number;
  score: Histogram;
  response_tokens: Histogram;
}
const SPLITS = [
  ["train", "Training"],
  ["validation", "Validation"],
] as const;
type Split = (typeof SPLITS)[number][0];
const [WIDTH, HEIGHT] = [600, 190];

export function Distributions({ chosen }: { chosen: Chosen[] }) {
  const { settings } = useRoute();
  const split = (settings.split ?? "train") as Split;
  return (
    <>
      <div class="bar">
        <Choice of={SPLITS} value={split} onChange={(one) => set({ split: one }, true)} label="split" />
        <span class="quiet">Each column is a step. The darker a place is, the larger is its share of the samples that were kept.</span>
      </div>
      {chosen.map((one) => (
        <OfRun key={one.run.id} one={one} split={split} />
      ))}
    </>
  );
}

function OfRun({ one: { run, colour }, split }: { one: Chosen; split: Split }) {
  const { data, error } = useAnswer<Histograms>(`/api/runs/${run.id}/samples/${split}/histograms`, 0, String(run.samples[split]));
  return (
    <section class="distributions">
      <RunTitle run={run} colour={colour} />
      <Problem text={error} />
      <Damaged files={data?.damaged} />
      {!data && !error && <div class="waiting" aria-busy="true" />}
      {data && !data.steps.length && <Empty title="No samples were kept">Runs keep samples while trainer.samples_to_keep is above 0.</Empty>}
      {data && data.steps.length > 0 && (
        <div class="charts">
          <Heat title="Score" steps={data.steps} of={data.score} colour={colour} />
          <Heat title="Response tokens" steps={data.steps} of={data.response_tokens} colour={colour} />
        </div>
      )}
      {data && data.left > 0 && <p class="quiet small">{plural(data.left, "step")} were not read in time. Reload to read them.</p>}
    </section>
  );
}

function Heat({ title, steps, of, colour }: { title: string; steps: number[]; of: Histogram; colour: string }) {
  const bins = of.edges.length - 1;
  if (bins < 1) return <Empty title={`${title}: no numbers`} />;
  const [wide, high] = [WIDTH / steps.length, HEIGHT / bins];
  return (
    <section class="card">
      <h3>{title}</h3>
      <div class="heat">
        <div class="scale quiet small">
          <span>{number(of.edges.at(-1))}</span>
          <span>{number(of.edges[0])}</span>
        </div>
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={`${title} by step`}>
          {of.counts.map((counts, column) => {
            const total = counts.reduce((sum, count) => sum + count, 0);
            return counts.map((count, bin) =>
              count ? (
                <rect
                  key={`${column} ${bin}`}
                  x={column * wide}
                  y={HEIGHT - (bin + 1) * high}
                  width={wide + 0.3}
                  height={high + 0.3}
                  fill={colour}
                  fill-opacity={0.08 + 0.92 * Math.sqrt(count / total)}
                >
                  <title>{`step ${steps[column]}: ${number(of.edges[bin])} to ${number(of.edges[bin + 1])}: ${count} of ${plural(total, "sample")}`}</title>
                </rect>
              ) : null,
            );
          })}
        </svg>
      </div>
      <div class="steps quiet small">
        <span>step {steps[0]}</span>
        <span>{steps.at(-1)}</span>
      </div>
    </section>
  );
}
