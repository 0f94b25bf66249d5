"""Which thread writes an element: an index turned around.

An index that is a sum of what is unknown (a thread's position, a loop's round, or a quotient or
remainder of these) times sizes is read as digits: the one with the largest factor is the element
divided by that, the next one what is left divided by its own, and so on. What comes out is a guess:
that the thread exists and writes there is proved afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from ...source.accesses import terms
from ...source.accesses.model import Access
from ...source.accesses.terms import Term

Found = dict[Term, Term]
_MOST_ORDERS = 24


def thread_of(access: Access, element: Term, known: Mapping[Term, Term]) -> Iterator[Found]:
    """Guesses of the thread, and the loops' rounds, that access an element.

    Args:
        known: what is decided already.
    """
    unknown = {
        leaf for t in (access.element, *access.path) for leaf in t.leaves
        if leaf.op == "counter" or (leaf.op == "symbol" and _of_thread(leaf))
    }  # fmt: skip
    for digits in _digits(terms.replaced(access.element, known), element, unknown):
        found = _leaves(digits, unknown)
        if found is None:
            continue
        for leaf in unknown - set(found) - set(known):
            found[leaf] = terms.const(0)
        yield {**known, **found}


def _of_thread(leaf: Term) -> bool:
    return str(leaf.value).startswith(("thread.", "group.", "local."))


def _digits(index: Term, target: Term, unknown: set[Term]) -> Iterator[Found]:
    """What the parts of an index are where it is a number."""
    if not index.leaves & unknown:
        yield {}
    elif index.op == "wrap":
        yield from _digits(index.args[0], target, unknown)
    elif index.op in ("add", "mul"):
        parts, rest = _split(index, unknown)
        if parts is None:
            return
        ordered = sorted(parts, key=lambda p: -_weight(p[0]))
        for order in itertools.islice(itertools.permutations(ordered), _MOST_ORDERS):
            if rest.op == "const" and rest.value and len(order) > 1:  # it belongs to the last one
                yield from _in_order(order, target, unknown, rest)
            yield from _in_order(order, terms.sub(target, rest), unknown)
    else:
        yield {index: target}


def _in_order(
    order: tuple[tuple[Term, Term], ...], target: Term, unknown: set[Term],
    more: Term | None = None,
) -> Iterator[Found]:  # fmt: skip
    """The digits, the one with the largest factor first.

    Args:
        more: what stands beside the last one.
    """
    found: list[Iterator[Found]] = []
    rest = target
    turned: dict[Term, Term] = {}  # digits that are counted from their other end, and its place
    upright: list[tuple[Term, Term]] = []
    for factor, digit in order:
        if factor.op == "const" and factor.value < 0:
            if digit.op == "fmod":
                turned[digit] = terms.sub(digit.args[1], terms.const(1))
                rest = terms.sub(rest, terms.mul(factor, turned[digit]))
            elif len(order) == 1:
                turned[digit] = terms.const(0)
            else:
                return
            factor = terms.neg(factor)
        upright.append((factor, digit))
    for i, (factor, digit) in enumerate(upright):
        last = i == len(order) - 1
        if last and more is not None:
            rest = terms.sub(rest, more)
        plain = last and factor is terms.const(1)
        value = rest if plain else terms.fdiv(rest, factor)
        if not last:
            rest = terms.fmod(rest, factor)
        if digit in turned:
            value = terms.sub(turned[digit], value)
        found.append(_digits(digit, value, unknown))
    for parts in itertools.product(*found):
        whole: Found = {}
        for part in parts:
            whole |= part
        yield whole


def _split(index: Term, unknown: set[Term]) -> tuple[list[tuple[Term, Term]] | None, Term]:
    """A sum as factors and digits, and what is left; None where it is none."""
    flat: dict[Term, list[Term]] = {}
    rest: list[Term] = []
    waiting = [(terms.const(1), index)]
    while waiting:
        factor, part = waiting.pop()
        if not part.leaves & unknown:
            rest.append(terms.mul(factor, part))
        elif part.op == "add":
            waiting += [(factor, a) for a in part.args]
        elif part.op == "wrap":
            waiting.append((factor, part.args[0]))
        elif part.op == "mul":
            a, b = part.args
            if a.leaves & unknown:
                a, b = b, a
            if a.leaves & unknown:
                return None, index
            factor = terms.mul(factor, a)
            if _plain(b).op == "add":  # digits of their own
                flat.setdefault(factor, []).append(b)
            else:
                waiting.append((factor, b))
        else:
            flat.setdefault(factor, []).append(part)
    digits = []
    for factor, parts in flat.items():
        if len(parts) > 1:
            return None, index
        digits.append((factor, parts[0]))
    return digits, terms.add(*rest)


def _plain(term: Term) -> Term:
    """What may wrap."""
    return _plain(term.args[0]) if term.op == "wrap" else term


def _weight(factor: Term) -> int:
    """How large a factor is likely to be."""
    sizes = sum(1 for t in terms.subterms(factor) if t.op == "symbol")
    number = 1
    for t in terms.subterms(factor):
        number *= abs(t.value) if t.op == "const" and type(t.value) is int and t.value else 1
    return sizes * 10_000 + min(number, 9999)


def _leaves(digits: Found, unknown: set[Term]) -> Found | None:
    """What the unknowns are, by what quotients and remainders of them are."""
    found: Found = {}
    waiting = dict(digits)
    while waiting:
        done = False
        for part, value in list(waiting.items()):
            if part in unknown:
                if part in found and found[part] is not value:
                    return None
                found[part] = value
            elif part.op in ("fdiv", "fmod"):
                whole, by = part.args
                other = "fmod" if part.op == "fdiv" else "fdiv"
                match = next((p for p in waiting if p.op == other and p.args == part.args), None)
                if match is not None:
                    high, low = (value, waiting[match])[:: 1 if part.op == "fdiv" else -1]
                    del waiting[match]
                elif part.op == "fdiv" and not _chain(part, waiting):
                    high, low = value, terms.const(0)
                elif part.op == "fmod" and not _chain(part, waiting):
                    high, low = terms.const(0), value
                else:
                    continue
                del waiting[part]
                new = terms.add(terms.mul(high, by), low)
                for inner in _digits(whole, new, unknown):
                    waiting |= inner
                    break
                done = True
                break
            else:
                return None
            del waiting[part]
            done = True
            break
        if not done:
            return None
    return found


def _chain(part: Term, waiting: Found) -> bool:
    """Whether another part may yet give what stands beside this one: a quotient of a quotient."""
    whole, by = part.args
    for other in waiting:
        if other is part or other.op not in ("fdiv", "fmod"):
            continue
        for inner in terms.subterms(other.args[0]):
            if inner.op in ("fdiv", "fmod") and inner.args == (whole, by):
                return True
    return False
