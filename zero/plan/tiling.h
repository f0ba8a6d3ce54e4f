// The size of tiles. On the device a tile is all that a rank keeps of a unit there, so that one kernel updates it:
// kernels are what an update costs there. Elsewhere a tile is the grain of copies and of the drive.
#pragma once

#include "zero/plan/layout.h"

namespace ballast {

// Elements of a tile outside the device, where the caller asks for no size. It depends on the model and the number of
// shards alone, so a training keeps its tiles when its tiers change.
std::size_t automatic_tile(const Model& model, std::size_t shards, Section UnitLayout::*of = &UnitLayout::trained);

// Cuts the tiles of a placement. `tile_elements`: at most so many in each tile, in every tier; 0: the sizes of this
// page.
Layout lay_out(const Model& model, const Placement& placement, std::size_t tile_elements);

}  // namespace ballast
