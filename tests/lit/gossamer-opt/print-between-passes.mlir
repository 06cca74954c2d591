// The module after each pass goes to standard error, under a heading with the pass as it was written.
// RUN: gossamer-opt %s -p 'canonicalize{top-down=false},func.func(cse)' --print-between-passes 2>&1 >%t | filecheck %s

// CHECK-LABEL: // -----// IR after canonicalize{top-down=false} //----- //
// CHECK:         %[[A:.*]] = arith.addf %arg0, %arg0
// CHECK:         %[[B:.*]] = arith.addf %arg0, %arg0
// CHECK:         arith.mulf %[[A]], %[[B]]
// CHECK-LABEL: // -----// IR after func.func(cse) //----- //
// CHECK:         %[[A:.*]] = arith.addf %arg0, %arg0
// CHECK:         arith.mulf %[[A]], %[[A]]
func.func @f(%a: f32) -> f32 {
  %unused = arith.constant 1.0 : f32
  %0 = arith.addf %a, %a : f32
  %1 = arith.addf %a, %a : f32
  %2 = arith.mulf %0, %1 : f32
  return %2 : f32
}
