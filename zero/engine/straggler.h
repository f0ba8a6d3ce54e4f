// Which rank the others wait for.
#pragma once

#include <ballast/step.h>

#include "zero/engine/mesh.h"

namespace ballast {

Straggler find_straggler(Mesh& mesh, double own_seconds);  // all ranks call together and get the same

}  // namespace ballast
