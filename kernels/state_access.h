// A tile's master and moments as plain numbers, for who looks at them or brings them from elsewhere. In host memory.
#pragma once

#include <span>

#include "kernels/backend.h"

namespace ballast::kernels {

// Throws B1001 where the rule keeps no such moment. `numbers` has an element for each of the tile's.
void read_moment(const TileMemory& tile, Moment moment, std::span<float> numbers);
void write_moment(const TileMemory& tile, Moment moment, std::span<const float> numbers);  // rounded to the nearest

// The master becomes what the parameter is.
void begin_master(const TileMemory& tile, Backend& backend);

// The same numbers in another tile of as many elements: bit by bit where both are kept alike, else through fp32 and
// rounded to the nearest. A tile without a master is frozen, if its parameter is not the master; a moment that `from`
// lacks becomes zero.
void copy_state(const TileMemory& from, const TileMemory& to);

}  // namespace ballast::kernels
