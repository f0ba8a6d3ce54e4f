// The only place that includes xxHash: its functions become static ones of each source, so each has its own instructions.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "offload/checksum.h"
