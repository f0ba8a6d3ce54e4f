// The only file that includes xxHash. Its functions become static in each source, so that each source has its own
// instructions.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "offload/checksum.h"
