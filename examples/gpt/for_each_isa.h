// Compiles a function for several instruction sets. The best one that the processor has is called.
#pragma once

// ThreadSanitizer would instrument the code that chooses one, which the loader runs before the sanitizer begins.
#ifdef __SANITIZE_THREAD__
#define BALLAST_FOR_EACH_ISA
#else
#define BALLAST_FOR_EACH_ISA [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#endif
