/* Nothing of this header is needed: it checks the version of the compiler behind nvcc. */
#pragma once
