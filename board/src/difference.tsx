// Two answers to one prompt, word by word: of two steps of a run, or of two runs.
import { diffWordsWithSpace } from "diff";
import { useMemo } from "preact/hooks";
import { type Group, type History, type Sample, useAnswer } from "./api";
import { characters, number } from "./format";
import { Empty } from "./parts";

const SIDE_BY_SIDE = 16;

const historyPath = (base: string, group: Group) => `${base}/history/${group.index}?${new URLSearchParams({ source: group.data_source })}`;

/** This group next to what the same run answered at another step. */
export function OtherStep({ group, base, other }: { group: Group; base: string; other: number }) {
  const history = useAnswer<History>(historyPath(base, group));
  const there = history.data?.steps.find(({ step }) => step === other);
  const theirs = useAnswer<Group>(there ? `${base}/${other}/${there.group}` : null);
  if (!theirs.data) return <div class="waiting" aria-busy="true" />;
  const groups = other < group.step ? [theirs.data, group] : [group, theirs.data];
  return <Pairs before={groups[0]} after={groups[1]} names={[`step ${groups[0].step}`, `step ${groups[1].step}`]} />;
}

/** This group next to what another run answered, at the step that is nearest. */
export function OtherRun({ group, base, names }: { group: Group; base: string; names: [string, string] }) {
  const history = useAnswer<History>(historyPath(base, group));
  const near = history.data?.steps.toSorted((a, b) => Math.abs(a.step - group.step) - Math.abs(b.step - group.step))[0];
  const theirs = useAnswer<Group>(near ? `${base}/${near.step}/${near.group}` : null);
  if (history.error) return <Empty title="The other run cannot be read">{history.error}</Empty>;
  if (history.data && !near) return <Empty title="The other run has kept no answer to this prompt" />;
  if (!theirs.data) return <div class="waiting" aria-busy="true" />;
  if (theirs.data.prompt.text !== group.prompt.text)
    return <Empty title="Another prompt">Row {group.index} of {group.data_source} is another prompt in that run.</Empty>;
  return <Pairs before={group} after={theirs.data} names={[`${names[0]}, step ${group.step}`, `${names[1]}, step ${theirs.data.step}`]} />;
}

function Pairs({ before, after, names }: { before: Group; after: Group; names: [string, string] }) {
  const pairs = before.samples.flatMap((sample, i) => (after.samples[i] ? [[sample, after.samples[i]] as const] : []));
  if (!pairs.length) return <Empty title="Nothing to compare" />;
  return (
    <div class="compared">
      {pairs.slice(0, SIDE_BY_SIDE).map(([old, young]) => (
        <Difference key={old.sample} old={old} young={young} names={names} />
      ))}
    </div>
  );
}

function Difference({ old, young, names }: { old: Sample; young: Sample; names: [string, string] }) {
  const parts = useMemo(() => diffWordsWithSpace(old.response.text, young.response.text, { timeout: 500 }), [old, young]);
  const side = (sample: Sample, name: string, leave: "added" | "removed") => (
    <section class="card sample">
      <div class="sample-head">
        <span class="quiet">
          {name}, #{sample.sample}
        </span>
        <strong class="score">{sample.failed ? "no score" : number(sample.score)}</strong>
        <span class="gap" />
        <span class="quiet">{number(sample.response_tokens)} tok</span>
      </div>
      <div class="text">
        {parts
          ? parts.filter((part) => !part[leave]).map((part, i) => (part.added ? <ins key={i}>{part.value}</ins> : part.removed ? <del key={i}>{part.value}</del> : <span key={i}>{part.value}</span>))
          : sample.response.text}
        {sample.response.length > characters(sample.response.text) && <p class="quiet">The first {number(characters(sample.response.text))} characters are compared.</p>}
      </div>
    </section>
  );
  return (
    <div class="pair">
      {side(old, names[0], "added")}
      {side(young, names[1], "removed")}
    </div>
  );
}
