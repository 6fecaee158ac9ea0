// The sanitizers with which a test program is built: 0 or 1 for each. gcc and clang tell it in
// different ways.
#pragma once

#if defined(__has_feature)
#define HYBRIDOPT_HAS_FEATURE(feature) __has_feature(feature)
#else
#define HYBRIDOPT_HAS_FEATURE(feature) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || HYBRIDOPT_HAS_FEATURE(address_sanitizer)
#define HYBRIDOPT_ASAN 1
#else
#define HYBRIDOPT_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__) || HYBRIDOPT_HAS_FEATURE(thread_sanitizer)
#define HYBRIDOPT_TSAN 1
#else
#define HYBRIDOPT_TSAN 0
#endif
