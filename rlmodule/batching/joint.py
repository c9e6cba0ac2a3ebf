"""The joint planner: ranks and micro-steps of a mini-batch at once, against the time ranks wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
import numpy as np

from rlmodule.batching.exchange import Cells, level, polish
from rlmodule.batching.filling import Heights, filled_closest, filled_roomiest, filled_tightest, water_filled
from rlmodule.batching.packing import Packing
from rlmodule.batching.partition import Ints, by_falling_cost
from rlmodule.batching.workload import Floats

GOOD_ENOUGH = 7e-4
TILTS = (0.0, 0.12, 0.25, 0.4)
TRIAL_ROUNDS=4
ROUNDS=40
POLISH=40
FINALISTS=1
CANDS=(('r',0),('t',0),('r',.12),('r',.25),('r',.4))
MORE=0.005
FULL=.97
WORTH=0.002
LOG=None

def plan_joint(cost: Floats, length: Ints, dp_size: int, token_budget: int, step_cost: float, multiple_of: int) -> Packing:
    order = by_falling_cost(cost)
    cost, length = cost[order], length[order]
    num_steps = max(1, -(-int(length.sum()) // (dp_size * token_budget)))
    num_steps += -num_steps % multiple_of
    bound = lower_bound(cost, length, dp_size, token_budget)
    while True:
        cells = _planned(cost, length, dp_size, token_budget, num_steps,bound)
        if cells is not None:
            break
        num_steps += multiple_of
    v=cells.lockstep_cost
    b1 = max(bound, pigeonhole(cost, num_steps * dp_size))
    fill=length.sum()/(num_steps*dp_size*token_budget)
    if v>b1*(1+MORE) and fill>FULL:
        more=_planned(cost, length, dp_size, token_budget, num_steps+multiple_of,bound)
        if more is not None:
            m=more.lockstep_cost
            if LOG is not None: LOG.append((fill,round(v/b1,4),round(m/b1,4)))
            if m+step_cost*multiple_of<v*(1-WORTH):
                cells=more;num_steps+=multiple_of
    cell = np.empty(len(cost), np.int64)
    cell[order] = cells.cell_of_sample()
    return Packing(cell, num_steps, dp_size).with_ranks_evened(cost[np.argsort(order)])

def pigeonhole(cost, num_cells):
    k = np.arange(1, (len(cost)-1)//num_cells+1)
    if len(k)==0: return float(cost[0]) if len(cost) else 0.
    total=np.concatenate([[0],np.cumsum(cost)])
    return max(float(cost[0]), float((total[k*num_cells+1]-total[k*num_cells-k]).max()))

def lower_bound(cost,length,dp_size,token_budget):
    big = cost[length > token_budget / 2][::dp_size].sum()
    return max(cost.sum() / dp_size, big)

def _planned(cost,length,dp_size,token_budget,num_steps,bound):
    bound = max(bound, pigeonhole(cost, num_steps * dp_size))
    goal = bound * (1 + GOOD_ENOUGH)
    tried = []
    u=cost.sum()/dp_size
    def go():
        seen=set()
        for how, tilt in CANDS:
            heights = water_filled(cost, dp_size, num_steps, tilt)
            key=(how,*np.round(heights.target/u,4).tolist())
            if key in seen: continue
            seen.add(key)
            f={'r':filled_roomiest,'t':filled_tightest,'c':filled_closest}[how]
            yield (how,tilt), heights, f(cost, length, heights, dp_size, token_budget)
    for name, heights, cell in go():
        if cell is None: continue
        cells = Cells(cost, length, cell, num_steps, dp_size, token_budget)
        g=cells.lockstep_cost
        v = level(cells, heights, TRIAL_ROUNDS, goal)
        tried.append((v, len(tried), cells, heights,name,g))
        if v <= goal: break
    if not tried: return None
    done=[]
    for v, i, cells, heights,name,g in sorted(tried, key=lambda t: t[:2])[:FINALISTS]:
        v2 = level(cells, heights, ROUNDS, goal)
        v3 = polish(cells, POLISH, goal)
        done.append((v3,i,cells))
        if LOG is not None: LOG.append((num_steps,[(t[4],round(t[5]/u,4),round(t[0]/u,4)) for t in tried],name,round(v2/u,4),round(v3/u,4), cells.members.shape))
        if v3<=goal: break
    return min(done,key=lambda t:t[:2])[2]
