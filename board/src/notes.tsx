// What somebody wrote about a run: a note and tags, kept in the folder of the run.
import { useState } from "preact/hooks";
import type { Run } from "./api";
import { Problem } from "./parts";

export interface Notes {
  note: string;
  tags: string[];
}

async function save(run: Run, notes: Notes): Promise<void> {
  const reply = await fetch(`/api/runs/${run.id}/notes`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(notes),
  });
  if (!reply.ok) throw new Error(((await reply.json()) as { error?: string }).error ?? `HTTP ${reply.status}`);
}

export function NotesSheet({ run, notes, close }: { run: Run; notes: Notes; close: (saved?: Notes) => void }) {
  const [note, setNote] = useState(notes.note);
  const [tags, setTags] = useState(notes.tags.join(", "));
  const [problem, setProblem] = useState<string | null>(null);
  const submit = (event: Event) => {
    event.preventDefault();
    const written = { note, tags: tags.split(",").map((tag) => tag.trim()).filter(Boolean) };
    save(run, written).then(
      () => close(written),
      (error: Error) => setProblem(error.message),
    );
  };
  return (
    <div class="veil" onClick={() => close()}>
      <div class="sheet" role="dialog" aria-label={`notes on ${run.name}`} onClick={(event) => event.stopPropagation()}>
        <form class="notes" onSubmit={submit}>
          <h2>{run.name}</h2>
          <label>
            Tags, with commas
            <input type="text" value={tags} onInput={(event) => setTags(event.currentTarget.value)} />
          </label>
          <label>
            Note
            <textarea rows={6} maxLength={10000} value={note} onInput={(event) => setNote(event.currentTarget.value)} />
          </label>
          <Problem text={problem} />
          <div class="bar">
            <button type="submit" class="main">
              Save
            </button>
            <button type="button" onClick={() => close()}>
              Cancel
            </button>
          </div>
        </form>
      </div>
    </div>
  );
}
