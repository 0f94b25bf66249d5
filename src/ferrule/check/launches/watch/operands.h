// What an instruction that traps computes, and of which two numbers: of a scalar sum, difference,
// product, quotient or square root, as x86-64 encodes it (Intel's manual, volume 2, chapter 2).
#pragma once
#include "state.h"

#include <ucontext.h>

#if defined(__x86_64__)
namespace {

// An instruction up to its operation's code, and what its prefixes say of registers.
struct encoded {
  const unsigned char* at;  // the ModRM byte
  unsigned code, prefix;    // prefix: 2 of float, 3 of double
  unsigned reg, index, base, source;  // bits 3 of registers; source: the whole number of the first operand's
  unsigned scale;           // of an 8-bit displacement
  bool two;                 // operands and a result apart
};

bool decode(const unsigned char* p, encoded& i) {
  i = encoded{};
  i.scale = 1;
  for (; *p == 0x66 || *p == 0xf2 || *p == 0xf3; ++p) i.prefix = *p == 0x66 ? 1 : *p == 0xf3 ? 2 : 3;
  unsigned last = 0;
  if (*p == 0xc5) {
    i.reg = ~p[1] >> 7 & 1, last = p[1], i.two = true, p += 2;
  } else if (*p == 0xc4 && (p[1] & 31) == 1) {
    i.reg = ~p[1] >> 7 & 1, i.index = ~p[1] >> 6 & 1, i.base = ~p[1] >> 5 & 1, last = p[2], i.two = true, p += 3;
  } else if (*p == 0x62 && (p[1] & 0x17) == 0x11 && (p[3] & 0x1f) == 8) {  // no mask, no registers above 15
    i.reg = ~p[1] >> 7 & 1, i.index = ~p[1] >> 6 & 1, i.base = ~p[1] >> 5 & 1, last = p[2], i.two = true, p += 4;
    i.scale = (last & 3) == 3 ? 8 : 4;
  } else {
    if ((*p & 0xf0) == 0x40) i.reg = *p >> 2 & 1, i.index = *p >> 1 & 1, i.base = *p & 1, ++p;
    if (*p++ != 0x0f) return false;
  }
  if (i.two) i.prefix = last & 3, i.source = ~last >> 3 & 15;
  i.code = *p++, i.at = p;
  return i.prefix >= 2;
}

// Where a memory operand lies.
uintptr_t address_of(const encoded& i, const ucontext_t* u) {
  static const int numbers[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  const auto value = [&](unsigned n) { return uintptr_t(u->uc_mcontext.gregs[numbers[n]]); };
  const unsigned char* p = i.at;
  const unsigned mode = *p >> 6, low = *p++ & 7;
  uintptr_t address = 0;
  bool wide = mode == 2, beside = mode == 0 && low == 5;  // a 32-bit displacement; from the next instruction
  if (low == 4) {
    const unsigned sib = *p++, index = (sib >> 3 & 7) | i.index << 3;
    if (index != 4) address += value(index) << (sib >> 6);
    if (mode == 0 && (sib & 7) == 5) wide = true;
    else address += value((sib & 7) | i.base << 3);
  } else if (!beside) {
    address = value(low | i.base << 3);
  }
  if (mode == 1) return address + uintptr_t(intptr_t(static_cast<signed char>(*p)) * intptr_t(i.scale));
  if (!wide && !beside) return address;
  int32_t displacement;
  memcpy(&displacement, p, 4);
  return address + uintptr_t(intptr_t(displacement)) + (beside ? uintptr_t(p + 4) : 0);
}

// The operands of the instruction at which a context stands, and its code; 0 where they are not known.
unsigned operands_of(const ucontext_t* u, double* first, double* second) {
  encoded i;
  if (!decode(reinterpret_cast<const unsigned char*>(u->uc_mcontext.gregs[REG_RIP]), i)) return 0;
  if (i.code != 0x51 && i.code != 0x58 && i.code != 0x59 && i.code != 0x5c && i.code != 0x5e) return 0;
  const auto number = [&](const void* from) {
    float f;
    double d;
    memcpy(&f, from, 4);
    if (i.prefix == 2) return double(f);
    memcpy(&d, from, 8);
    return d;
  };
  const auto* registers = u->uc_mcontext.fpregs->_xmm;
  const unsigned reg = (*i.at >> 3 & 7) | i.reg << 3, rm = (*i.at & 7) | i.base << 3;
  const bool in_register = *i.at >> 6 == 3;
  if (in_register && i.index) return 0;  // above 15
  *second = number(in_register ? static_cast<const void*>(&registers[rm]) : reinterpret_cast<const void*>(address_of(i, u)));
  *first = i.code == 0x51 ? *second : number(&registers[i.two ? i.source : reg]);
  return i.code;
}

}  // namespace
#endif
