from strop.api.algorithms import grpo as grpo
from strop.api.algorithms import ppo as ppo
from strop.api.algorithms import reinforce_plus_plus as reinforce_plus_plus
from strop.api.algorithms import reinforce_plus_plus_baseline as reinforce_plus_plus_baseline
from strop.api.algorithms import remax as remax
from strop.api.algorithms import rloo as rloo
from strop.api.inference import Evaluation as Evaluation
from strop.api.inference import evaluate as evaluate
from strop.api.inference import generate as generate
from strop.api.run import Chart as Chart
from strop.api.run import Run as Run
from strop.api.supervised import dpo as dpo
from strop.api.supervised import reward_model as reward_model
from strop.api.supervised import sft as sft
from strop.api.table import Table as Table
from strop.policy.batches import Datum as Datum
from strop.policy.batches import StepOutput as StepOutput
from strop.policy.policy import Policy as Policy

__version__: str
__all__: list[str]
