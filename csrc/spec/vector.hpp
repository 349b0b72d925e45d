// Macros for functions that are built for several instruction sets, inlined, or for host and device.
#pragma once

// One of several instruction sets is picked when the library is loaded, where that is possible.

// Not under the address sanitizer: the pick runs before the sanitizer's own start.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define SPEC_CLONES __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define SPEC_CLONES
#endif

#if defined(__GNUC__)
#define SPEC_INLINE inline __attribute__((always_inline))
#else
#define SPEC_INLINE inline
#endif

#if defined(__CUDACC__)
#define SPEC_HD __host__ __device__
#else
#define SPEC_HD
#endif
