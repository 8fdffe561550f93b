// One prompt with all its samples side by side, and what it scored at other steps.
import { useState } from "preact/hooks";
import { get, type Group, type History, type Picture, type Sample, type Text, useAnswer } from "./api";
import { OtherRun, OtherStep } from "./difference";
import { characters, number, plural, signed } from "./format";
import { useKeys } from "./keys";
import type { Chosen } from "./main";
import { Badge, Choice } from "./parts";
import { set, useRoute } from "./route";
import { COLOURINGS, type Colouring, Legend, TokenText } from "./tokens";

const SIDE_BY_SIDE = 16;

interface Shown {
  group: Group;
  base: string;
  split: string;
  steps: number[];
  /** The name of its run. */
  name: string;
  /** Further chosen runs. */
  others: Chosen[];
}

export function GroupView({ group, base, split, steps, name, others }: Shown) {
  const { settings } = useRoute();
  const rival = others.find(({ run }) => run.id === settings.with)?.run;
  const [colouring, setColouring] = useState<Colouring>((localStorage.getItem("colouring") as Colouring) ?? "text");
  const [shown, setShown] = useState(SIDE_BY_SIDE);
  const [other, setOther] = useState<number | null>(null);
  // Validation has the same prompts every time; in training they come back with the next epoch, if at all.
  const [looking, setLooking] = useState(split === "validation");
  const paint = (one: Colouring) => {
    localStorage.setItem("colouring", one);
    setColouring(one);
  };
  const at = COLOURINGS.findIndex(([one]) => one === colouring);
  useKeys({ c: () => paint(COLOURINGS[(at + 1) % COLOURINGS.length][0]) });
  const place = `${base}/${split}/${group.step}/${group.group}`;
  // Those of the prompt are the same for every sample; a tool may have shown more to one of them.
  const common = group.samples[0].images.filter((i) => group.samples.every((sample) => sample.images.includes(i)));
  return (
    <article class="group">
      <div class="group-head">
        <h2>
          Row {group.index} <span class="quiet">of {group.data_source}, step {group.step}</span>
        </h2>
        <span class="gap" />
        {others.length > 0 && (
          <select value={rival?.id ?? ""} aria-label="compare with run" onChange={(event) => set({ with: event.currentTarget.value }, true)}>
            <option value="">compare with a run</option>
            {others.map(({ run }) => (
              <option key={run.id} value={run.id}>
                {run.name}
              </option>
            ))}
          </select>
        )}
        <Choice of={COLOURINGS} value={colouring} onChange={paint} label="colour tokens by" />
      </div>
      <section class="prompt-box">
        <div class="label">
          prompt <span class="quiet">{number(group.prompt_tokens)} tokens</span>
        </div>
        <LongText text={group.prompt} path={`${place}/${group.samples[0].sample}/text/prompt`} />
        <Pictures of={common.map((i) => group.images[i])} />
        {group.ground_truth && (
          <>
            <div class="label">expected</div>
            <LongText text={group.ground_truth} path={`${place}/${group.samples[0].sample}/text/ground_truth`} />
          </>
        )}
      </section>
      {steps.length > 1 && looking && <OverTime group={group} base={`${base}/${split}`} other={other} choose={setOther} />}
      {steps.length > 1 && !looking && (
        <button type="button" class="small-button" onClick={() => setLooking(true)}>
          Look for this prompt at other steps
        </button>
      )}
      <Legend colouring={colouring} />
      {rival ? (
        <OtherRun key={rival.id} group={group} base={`/api/runs/${rival.id}/samples/${split}`} names={[name, rival.name]} />
      ) : other === null ? (
        <div class="samples">
          {group.samples.slice(0, shown).map((sample) => (
            <SampleCard
              key={sample.sample}
              sample={sample}
              place={`${place}/${sample.sample}`}
              colouring={colouring}
              pictures={sample.images.filter((i) => !common.includes(i)).map((i) => group.images[i])}
            />
          ))}
        </div>
      ) : (
        <OtherStep group={group} base={`${base}/${split}`} other={other} />
      )}
      {!rival && other === null && group.samples.length > shown && (
        <button type="button" class="more" onClick={() => setShown(shown + SIDE_BY_SIDE)}>
          {group.samples.length - shown} more samples
        </button>
      )}
    </article>
  );
}

interface Card {
  sample: Sample;
  place: string;
  colouring: Colouring;
  /** Images that not every sample of the prompt has. */
  pictures: Picture[];
}

function SampleCard({ sample, place, colouring, pictures }: Card) {
  const conversation = sample.turns.length > 0;
  const parts = Object.entries(sample.reported).filter(([, value]) => value !== null && value !== "");
  return (
    <section class="card sample">
      <div class="sample-head">
        <span class="quiet">#{sample.sample}</span>
        <strong class="score">{sample.failed ? "no score" : number(sample.score)}</strong>
        {sample.advantage !== null && (
          <span class={Number(sample.advantage) > 0 ? "good" : Number(sample.advantage) < 0 ? "bad" : "quiet"} title="advantage, mean over trained tokens">
            A {signed(sample.advantage)}
          </span>
        )}
        <span class="gap" />
        <span class="quiet">{number(sample.response_tokens)} tok</span>
        {sample.tool_results > 0 && <span class="quiet">{plural(sample.tool_results, "tool result")}</span>}
        {sample.truncated && <Badge kind="warning">truncated</Badge>}
        {sample.failed && <Badge kind="failed">reward failed</Badge>}
      </div>
      {parts.length > 0 && (
        <dl class="components">
          {parts.map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd title={String(value)}>{typeof value === "number" ? number(value) : String(value).slice(0, 80)}</dd>
            </div>
          ))}
        </dl>
      )}
      {colouring === "text" && !conversation ? (
        <LongText text={sample.response} path={`${place}/text/response`} />
      ) : (
        <TokenText place={place} colouring={colouring} turns={sample.turns} />
      )}
      <Pictures of={pictures} />
    </section>
  );
}

/** Small pictures, in the order of their placeholders. */
function Pictures({ of }: { of: Picture[] }) {
  if (!of.length) return null;
  return (
    <div class="pictures">
      {of.map(({ source, width, height, video }, i) => {
        const size = `${video ? "video" : "image"} ${i + 1}, ${width} x ${height} pixels`;
        return (
          <figure key={i}>
            {source ? <img src={source} alt={size} loading="lazy" /> : <span class="quiet">not kept</span>}
            <figcaption class="quiet">{size}</figcaption>
          </figure>
        );
      })}
    </div>
  );
}

/** A text of which more can be asked for. */
function LongText({ text, path }: { text: Text; path: string }) {
  const [more, setMore] = useState("");
  const have = characters(text.text) + characters(more);
  return (
    <div class="text">
      {text.text}
      {more}
      {text.text === "" && <span class="quiet">empty</span>}
      {have < text.length && (
        <button type="button" class="more" onClick={() => void get<Text>(`${path}?start=${have}`).then((next) => setMore(more + next.text))}>
          {number(text.length - have)} more characters
        </button>
      )}
    </div>
  );
}

function mean(scores: unknown[]): number | null {
  const known = scores.filter((score): score is number => typeof score === "number");
  return known.length ? known.reduce((sum, score) => sum + score, 0) / known.length : null;
}

/** What this row of the data scored at every step; one of them can be compared with this one. */
function OverTime(props: { group: Group; base: string; other: number | null; choose: (step: number | null) => void }) {
  const { group, other, choose } = props;
  const path = `${props.base}/history/${group.index}?${new URLSearchParams({ source: group.data_source })}`;
  const { data } = useAnswer<History>(path);
  if (!data) return <div class="waiting" aria-busy="true" />;
  if (data.steps.length < 2) return <p class="quiet small">This prompt was kept at no other step{data.left ? " of the newest" : ""}.</p>;
  const means = data.steps.map(({ scores }) => mean(scores));
  const known = means.filter((one): one is number => one !== null);
  const [low, high] = [Math.min(0, ...known), Math.max(1, ...known)];
  return (
    <section class="over-time">
      <span class="label">same prompt at</span>
      <div class="pills">
        {data.steps.map(({ step }, i) => {
          const share = means[i] === null ? 0 : (means[i]! - low) / (high - low);
          return (
            <button
              type="button"
              key={step}
              class={step === group.step ? "pill here" : "pill"}
              aria-pressed={step === other}
              disabled={step === group.step}
              title={step === group.step ? "this step" : `compare with step ${step}`}
              onClick={() => choose(step === other ? null : step)}
            >
              {step}
              <i style={{ width: `${Math.round(share * 100)}%` }} />
              <small>{number(means[i])}</small>
            </button>
          );
        })}
      </div>
    </section>
  );
}
