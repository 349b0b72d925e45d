// Code for an instruction set between CPU_TARGET_BEGIN(list) and CPU_TARGET_END, whatever the flags of the build are.
#pragma once

#define CPU_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define CPU_TARGET_BEGIN(list) CPU_PRAGMA(clang attribute push(__attribute__((target(list))), apply_to = function))
#define CPU_TARGET_END CPU_PRAGMA(clang attribute pop)
#else
#define CPU_TARGET_BEGIN(list) CPU_PRAGMA(GCC push_options) CPU_PRAGMA(GCC target(list))
#define CPU_TARGET_END CPU_PRAGMA(GCC pop_options)
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define CPU_X86 1
#else
#define CPU_X86 0
#endif
