// An answer token by token, coloured by what the engine and the trainer know about each.
import { useEffect, useState } from "preact/hooks";
import { get, type Tokens, type Turn } from "./api";
import { number, signed } from "./format";
import { Problem } from "./parts";

export const COLOURINGS = [
  ["text", "Text"],
  ["log_prob", "Log-prob"],
  ["advantage", "Advantage"],
  ["ratio", "Ratio"],
  ["entropy", "Entropy"],
  ["role", "Mask"],
] as const;
export type Colouring = (typeof COLOURINGS)[number][0];

const ROLES = ["environment", "trained", "sampled, not trained"];
const LEGENDS: Record<Colouring, [string, string, string] | null> = {
  text: null,
  log_prob: ["unlikely", "surprise", "certain"],
  advantage: ["discouraged", "signed", "encouraged"],
  ratio: ["trainer finds it less likely than the engine", "signed", "more likely"],
  entropy: ["no choice", "surprise-back", "many choices"],
  role: null,
};

export function Legend({ colouring }: { colouring: Colouring }) {
  if (colouring === "role")
    return (
      <p class="legend">
        {ROLES.map((role, i) => (
          <span key={role} class={`role-${i}`}>
            {role}
          </span>
        ))}
      </p>
    );
  const legend = LEGENDS[colouring];
  return legend ? (
    <p class="legend">
      {legend[0]} <i class={`ramp ${legend[1]}`} /> {legend[2]}
    </p>
  ) : null;
}

interface Facts {
  ratio: number | null;
  logProb: number | null;
  advantage: number | null;
  entropy: number | null;
  reference: number | null;
  value: number | null;
  role: number;
}

function factsOf(found: Tokens, i: number): Facts {
  const role = found.role[i];
  const own = (list: (number | null)[] | null) => (role === 0 ? null : (list?.[i] ?? null));
  const [rollout, trained] = [own(found.rollout_log_probs), own(found.trained_log_probs)];
  return {
    role,
    logProb: rollout,
    ratio: rollout === null || trained === null ? null : Math.exp(trained - rollout),
    advantage: own(found.advantages),
    entropy: own(found.entropy),
    reference: own(found.ref_log_probs),
    value: own(found.values),
  };
}

const clamp = (value: number) => Math.max(0, Math.min(1, value));

/** A class and a strength from 0 to 1, which the style sheet turns into a colour of the theme. */
function paint(facts: Facts, colouring: Colouring): [string, number] {
  const signedBy = (value: number | null, full: number): [string, number] =>
    value === null ? ["unknown", 0] : [value < 0 ? "minus" : "plus", clamp(Math.abs(value) / full)];
  switch (colouring) {
    case "log_prob":
      return facts.logProb === null ? ["unknown", 0] : ["hot", clamp(-facts.logProb / 5)];
    case "entropy":
      return facts.entropy === null ? ["unknown", 0] : ["hot", clamp(facts.entropy / 3)];
    case "advantage":
      return signedBy(facts.advantage, 2);
    case "ratio":
      return signedBy(facts.ratio === null ? null : Math.log(facts.ratio), 0.2);
    case "role":
      return [`role-${facts.role}`, 0];
    default:
      return ["", 0];
  }
}

/** Tokens as they come: an answer of many thousands is asked for piece by piece. */
function useTokens(place: string): [Tokens[], string | null, () => void] {
  const [pieces, setPieces] = useState<Tokens[]>([]);
  const [error, setError] = useState<string | null>(null);
  const ask = (start: number, before: Tokens[], stop?: AbortSignal) =>
    get<Tokens>(`${place}/tokens?start=${start}`, stop).then(
      (piece) => setPieces([...before, piece]),
      (problem: Error) => stop?.aborted || setError(problem.message),
    );
  useEffect(() => {
    const stop = new AbortController();
    void ask(0, [], stop.signal);
    return () => stop.abort();
  }, [place]);
  const have = pieces.reduce((sum, piece) => sum + piece.ids.length, 0);
  return [pieces, error, () => void ask(have, pieces)];
}

export function TokenText({ place, colouring, turns }: { place: string; colouring: Colouring; turns: Turn[] }) {
  const [pieces, error, more] = useTokens(place);
  const [over, setOver] = useState<number | null>(null);
  if (error) return <Problem text={error} />;
  if (!pieces.length) return <div class="waiting" aria-busy="true" />;
  const spans: { i: number; text: string; facts: Facts; id: number }[] = [];
  for (const piece of pieces)
    piece.ids.forEach((id, i) => spans.push({ i: piece.start + i, text: piece.tokens[i], facts: factsOf(piece, i), id }));
  const have = spans.length;
  const { length } = pieces[0];
  const blocks = turns.length ? turns.filter((turn) => turn.start < have) : [{ role: "", start: 0, end: length, reward: null }];
  const nothing = colouring !== "text" && colouring !== "role" && spans.every(({ facts }) => paint(facts, colouring)[0] === "unknown");
  return (
    <div
      class={`tokens by-${colouring}`}
      onMouseOver={(event) => {
        const i = (event.target as HTMLElement).dataset?.i;
        setOver(i === undefined ? null : Number(i));
      }}
      onMouseLeave={() => setOver(null)}
    >
      {nothing && <p class="quiet small">{WHY[colouring]}</p>}
      {blocks.map((turn) => (
        <div key={turn.start} class={turn.role ? `turn ${turn.role === "assistant" ? "assistant" : "environment"}` : "turn alone"}>
          {turn.role && (
            <div class="label">
              {turn.role}
              {turn.reward !== null && <span class="quiet"> reward {signed(turn.reward)}</span>}
            </div>
          )}
          <div class="text">
            {spans.slice(turn.start, turn.end).map(({ i, text, facts }) => {
              const [kind, strength] = paint(facts, colouring);
              return (
                <span key={i} data-i={i} class={kind} style={strength ? { "--s": strength.toFixed(2) } : undefined}>
                  {text}
                </span>
              );
            })}
          </div>
        </div>
      ))}
      {have < length && (
        <button type="button" class="more" onClick={more}>
          {number(length - have)} more tokens
        </button>
      )}
      <p class="token-facts quiet" aria-live="off">
        {over !== null && spans[over] ? <TokenFacts {...spans[over]} /> : "Point at a token for its numbers."}
      </p>
    </div>
  );
}

const WHY: Partial<Record<Colouring, string>> = {
  advantage: "Validation has no advantages: nothing is learned from it.",
  ratio: "The trainer did not compute these log-probs: answers without an advantage need no pass, and validation none at all.",
  entropy: "No entropy was computed for these tokens: answers without an advantage need no pass, and validation none at all.",
};

function TokenFacts({ i, id, text, facts }: { i: number; id: number; text: string; facts: Facts }) {
  const rows: [string, string][] = [
    ["id", String(id)],
    ["log-prob", number(facts.logProb)],
    ["advantage", signed(facts.advantage)],
    ["ratio", number(facts.ratio)],
    ["entropy", number(facts.entropy)],
    ["reference log-prob", number(facts.reference)],
    ["value", number(facts.value)],
  ];
  return (
    <>
      <code>{JSON.stringify(text).slice(0, 40)}</code> {i} · {ROLES[facts.role]}
      {rows
        .filter(([, value]) => value !== "–")
        .map(([name, value]) => (
          <span key={name}>
            {" "}
            · {name} <b>{value}</b>
          </span>
        ))}
    </>
  );
}
