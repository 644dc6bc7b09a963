"""Comparing a batch's prompts with the grading texts that the private file has, and the other way round.

Tasks and sessions come from different topics, in any order: so a batch's prompts are compared with all stored texts of their
groups, and its texts with the stored prompts of theirs. The result does not depend on who came first.
"""

import orjson
import pyarrow as pa

from rollstream.store.batch import Batch
from rollstream.store.contamination import GradingText, Prompt, findings, prompt_text
from rollstream.store.database import DatabaseFile
from rollstream.store.tables import GRADING_TEXTS

FORGET_PRUNED_SESSIONS = """
DELETE FROM contaminated
WHERE session_id NOT IN (SELECT session_id FROM session_ready UNION ALL SELECT session_id FROM agent_stepped)
"""
_TEXTS_OF = f"SELECT group_id, field, text, in_task FROM {GRADING_TEXTS} WHERE group_id IN (SELECT group_id FROM batch)"
_PROMPTS_OF = """
SELECT '{kind}', run_id, group_id, rollout_id, session_id, whole_payload('{kind}', event_id, payload)
FROM {table}
WHERE group_id IN (SELECT group_id FROM batch)
"""


def flag_contamination(public: DatabaseFile, private: DatabaseFile, batch: Batch) -> None:
    """Flag the sessions whose prompts have grading data, as far as this batch makes them known."""
    prompts = list(batch.prompts)
    if new := {str(row[2]) for row in batch.private.get(GRADING_TEXTS, [])}:
        prompts += _stored_prompts(public, new)
    if not prompts:
        return
    found = findings(prompts, _texts(private, {prompt.group for prompt in prompts}))
    if found:
        rows = [(one.run, one.group, one.rollout, one.session, one.field, one.in_task) for one in found]
        names = ("run_id", "group_id", "rollout_id", "session_id", "field", "in_task")
        columns = [pa.array(values) for values in zip(*rows, strict=True)]
        public.insert(pa.Table.from_arrays(columns, names=names), "INSERT OR IGNORE INTO contaminated FROM batch")


def _texts(private: DatabaseFile, groups: set[str]) -> dict[str, list[GradingText]]:
    """Grading texts by group; the batch's own are stored already."""
    texts: dict[str, list[GradingText]] = {}
    for group, field, text, in_task in private.select(_groups(groups), _TEXTS_OF):
        texts.setdefault(str(group), []).append(GradingText(str(field), str(text), bool(in_task)))
    return texts


def _stored_prompts(public: DatabaseFile, groups: set[str]) -> list[Prompt]:
    prompts = []
    for kind, table in (("SessionReady", "session_ready"), ("AgentStepped", "agent_stepped")):
        for row in public.select(_groups(groups), _PROMPTS_OF.format(kind=kind, table=table)):
            _, run, group, rollout, session, payload = row
            text = prompt_text(orjson.loads(str(payload)))
            if text:
                prompts.append(Prompt(str(run), str(group), str(rollout), str(session), text))
    return prompts


def _groups(groups: set[str]) -> pa.Table:
    return pa.table({"group_id": pa.array(sorted(groups), pa.string())})
