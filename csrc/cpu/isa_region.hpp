// Code for an instruction set between CPU_ISA_BEGIN(list) and CPU_ISA_END, whatever the flags of the build are.
#pragma once

#define CPU_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define CPU_ISA_BEGIN(list) CPU_PRAGMA(clang attribute push(__attribute__((target(list))), apply_to = function))
#define CPU_ISA_END CPU_PRAGMA(clang attribute pop)
#else
#define CPU_ISA_BEGIN(list) CPU_PRAGMA(GCC push_options) CPU_PRAGMA(GCC target(list))
#define CPU_ISA_END CPU_PRAGMA(GCC pop_options)
#endif

#define CPU_INLINE static inline __attribute__((always_inline))
#define CPU_MEMBER inline __attribute__((always_inline))
