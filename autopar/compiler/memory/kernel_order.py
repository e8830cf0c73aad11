"""Prototype: order by simulated LHS."""
import math, os
from autopar.compiler.memory.latency_hiding import schedule
from autopar.compiler.memory.liveness import kernels
from autopar.compiler.memory.ordering import OpOrder, _combined, _tail, _predecessors
from autopar.compiler.spmd.local_program import Reshard, Value


def _form(eqn, number, swapped):
    """'' if a product reads an operand as it is, 'm' with dimensions merged, 't' transposed as well."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    contract, batch = (lc, lb) if number == 0 else (rc, rb)
    ndim = eqn.invars[number].aval.ndim
    free = [d for d in range(ndim) if d not in contract and d not in batch]
    if len(free) <= 1 and len(contract) <= 1:
        return ""
    first = (number == 0) != swapped
    order = [*batch, *free, *contract] if first else [*batch, *contract, *free]
    return "t" if order != sorted(order) else "m"


class Graph:
    def __init__(self, program, machine):
        self.p, self.m = program, machine
        ops, nbytes = program.ops, program.nbytes
        self.ops, self.nbytes = ops, nbytes
        inputs = [k for k in program.inputs if k is not None]
        outputs = [k for k in program.outputs if k is not None]
        self.reads, self.makes = kernels(ops, inputs, outputs, nbytes)
        self.before = _predecessors(ops)
        self.maker = {k: n for n, op in enumerate(ops) for k in op.results}
        self.by_value = {}
        for k in [*inputs, *self.maker]:
            self.by_value.setdefault(k.value, k)
        self.roots, self.viewers = {}, {}
        for t, op in enumerate(ops):
            if op.kind in ("view", "form"):
                self.viewers.setdefault(op.reads[0], []).append(t)
                self.roots[op.results[0]] = self.roots.get(op.reads[0], op.reads[0])
        tail = _tail(ops, self.before)
        groups = _combined(ops, self.before, tail, nbytes, machine.scatters_sums, machine.combined_bytes)
        if os.environ.get("GATHERS", "1") == "1":
            groups = [*groups, *self.gathers(set(n for g in groups for n in g))]
        self.leader = {n: g[-1] for g in groups for n in g}
        self.members = {}
        for n in self.reads:
            self.members.setdefault(self.leader.get(n, n), []).append(n)
        self.need, self.secs, self.coll, self.free, self.back, self.pos = [], [], [], [], [], []
        self.node_of_key, self.forms = {}, {}
        for k in dict.fromkeys(inputs):
            self.node_of_key[k] = self.add([], 0.0, False, True, None)
        self.barriers, self.ids = {}, {}
        for n, op in enumerate(ops):
            if op.kind == "barrier":
                self.ids[n] = self.barriers[id(program.actions[n].bodies[0])] = self.add([], 0.0, False, True, None)
            elif n in self.reads:
                lead = self.leader.get(n, n)
                if lead not in self.ids:
                    self.ids[lead] = self.add([], 0.0, False, False, lead)
                    self.pos[-1] = n if op.collective == "all-gather" else lead
                for k in self.makes[n]: self.node_of_key[k] = self.ids[lead]
        for n, op in enumerate(ops):
            if op.kind == "barrier":
                self.need[self.ids[n]] = list(dict.fromkeys(i for k in op.reads for i in self.nodes(k)))
            elif n in self.members:
                self.add_kernel(n)

    def gathers(self, taken):
        """Groups of all-gathers: of operands that wait for the same."""
        groups, open_groups = [], {}
        for n, op in enumerate(self.ops):
            if op.collective != "all-gather" or n in taken or n not in self.reads:
                continue
            action = self.p.actions[n]
            after = getattr(action, "after", None)
            made = tuple(sorted(self.collectives_before(n)))
            key = (tuple(getattr(s, "axes", None) for s in op.steps), after, made, id(op.results[0].block))
            size = sum(self.nbytes[k] for k in op.results)
            group, total = open_groups.get(key, ([], 0.0))
            if not group or total + size > self.m.combined_bytes:
                group, total = [], 0.0
                groups.append(group)
            group.append(n)
            open_groups[key] = group, total + size
        return groups

    def collectives_before(self, n):
        found, left = set(), [*self.before[n]]
        seen = set()
        while left:
            o = left.pop()
            if o in seen: continue
            seen.add(o)
            if self.ops[o].collective: found.add(o)
            left += self.before[o]
        return found

    def add(self, need, s, c, f, b):
        self.need.append(list(dict.fromkeys(need))); self.secs.append(s); self.coll.append(c); self.free.append(f); self.back.append(b); self.pos.append(-1)
        return len(self.need) - 1

    def nodes(self, key):
        key = self.roots.get(key, key)
        if key in self.node_of_key: return [self.node_of_key[key]]
        n = self.maker.get(key)
        return [] if n is None else [i for k in self.ops[n].reads for i in self.nodes(k)]

    def keyof(self, n, number):
        action, keys = self.p.actions[n], self.ops[n].reads
        want = action.operands[number]
        for k in keys:
            if k.value is want: return self.roots.get(k, k)
        values = [v for v in action.operands if isinstance(v, Value)]
        if isinstance(want, Value) and len(keys) == len(values):
            k = keys[values.index(want)]
            return self.roots.get(k, k)
        return None

    def behind(self, n, seen):
        """Barriers that a kernel's ops stand behind: those that read from outside of a region."""
        found = []
        if n in seen: return found
        seen.add(n)
        op = self.ops[n]
        blocks = {id(k.block) for k in op.results}
        for b in blocks & self.barriers.keys():
            if any(id(k.block) != b for k in op.reads):
                found.append(self.barriers[b])
        for o in self.before[n]:
            if o not in self.reads:  # fused into this one
                found += self.behind(o, seen)
        return found

    def add_kernel(self, n):
        op, mine = self.ops[n], self.members[n]
        r = list(dict.fromkeys(k for m in mine for k in self.reads[m]))
        needs = [i for k in r for i in self.nodes(k)]
        eqn = getattr(self.p.actions[n], "eqn", None)
        if eqn is not None and eqn.primitive.name == "dot_general":
            swapped = any(getattr(self.p.actions[t], "eqn", None) is not None and self.p.actions[t].eqn.primitive.name == "transpose" for k in op.results for t in self.viewers.get(k, ()))
            needs = []
            for number, _ in enumerate(self.p.actions[n].operands):
                place = self.keyof(n, number)
                if place is None: continue
                f = _form(eqn, number, swapped)
                if not f:
                    needs += self.nodes(place); continue
                if (place, f) not in self.forms:
                    self.forms[place, f] = self.add(self.nodes(place), 0.0, False, True, None)
                needs.append(self.forms[place, f])
        for m in mine:
            after = getattr(self.p.actions[m], "after", None)
            if after is not None:
                needs += self.nodes(self.by_value[after]) if after in self.by_value else []
        for m in mine:
            needs += self.behind(m, set())
        c = bool(op.collective)
        if c: s = sum(self.ops[m].seconds for m in mine) - (len(mine) - 1) * min(self.ops[m].seconds for m in mine)
        elif op.seconds and op.seconds < math.inf: s = op.seconds
        elif op.seconds: s = 1e-3
        else: s = (sum(self.nbytes[k] for k in r) + sum(self.nbytes[k] for m in mine for k in self.makes[m])) / self.m.memory_bandwidth
        i = self.ids[n]
        self.need[i], self.secs[i], self.coll[i] = [each for each in dict.fromkeys(needs) if each != i], s, c


def order_kernels(program, machine):
    g = Graph(program, machine)
    ops, before = g.ops, g.before
    order_nodes = schedule(g.need, g.secs, g.coll, g.free, g.pos)
    rank, ends = {}, {}
    for place, (i, is_end) in enumerate(order_nodes):
        n = g.back[i]
        if n is not None:
            for m in g.members[n]:
                if is_end: ends[m] = place
                else: rank[m] = place
    times = [rank.get(n) for n in range(len(ops))]
    first = {}
    for n in range(len(ops) - 1, -1, -1):
        if times[n] is None:
            times[n] = first.get(n, math.inf)
        for o in before[n]:
            first[o] = min(first.get(o, math.inf), times[n])
    order = sorted(range(len(ops)), key=lambda n: (times[n], n))
    found = [ops[n] for n in order]
    # Operands of a collective are read until it is done.
    import bisect
    placed = [times[n] for n in order]
    for m, end in ends.items():
        last = bisect.bisect_left(placed, end) - 1
        while last >= 0 and (found[last].kind in ("view", "form", "constant") or order[last] not in g.reads):
            last -= 1
        if last > 0 and placed[last] > rank[m] and ops[m].reads:
            found[last] = found[last]._replace(reads=tuple(dict.fromkeys((*found[last].reads, *ops[m].reads))))
    if os.environ.get("LHS") == "2":
        for i, e in order_nodes:
            if g.back[i] is not None and (ops[g.back[i]].seconds):
                a = program.actions[g.back[i]]
                from autopar.compiler.memory.estimate import _label
                print("  ", round(g.secs[i]*1e6,1), "done" if e else "", ops[g.back[i]].collective or "P", _label(a).text[:60], len(g.members[g.back[i]]), [str(getattr(k.value.variable.aval,'shape',None)) for k in ops[g.back[i]].results][:2])
    return OpOrder(ops=found, order=order, deferred=None)
