// A bound chosen by a comparison that is true of a NaN becomes a maximum or minimum, which gives the NaN back.
// RUN: gossamer-opt %s -p 'keep-nan,canonicalize' --split-input-file | filecheck %s

// CHECK-LABEL: func.func @clamp(
// CHECK-SAME:    %[[X:.*]]: f32, %[[LOW:.*]]: f32, %[[HIGH:.*]]: f32
// CHECK-NEXT:    %[[ABOVE:.*]] = arith.maximumf %[[X]], %[[LOW]]
// CHECK-NEXT:    %[[Y:.*]] = arith.minimumf %[[ABOVE]], %[[HIGH]]
// CHECK-NEXT:    return %[[Y]]
func.func @clamp(%x: f32, %low: f32, %high: f32) -> f32 {
  %0 = arith.cmpf ult, %x, %low : f32
  %1 = arith.select %0, %low, %x : f32
  %2 = arith.cmpf ugt, %1, %high : f32
  %3 = arith.select %2, %high, %1 : f32
  return %3 : f32
}

// -----

// What users compare themselves, and relu, which keeps a NaN as it is, stay.
// CHECK-LABEL: func.func @others(
// CHECK:         arith.cmpf olt
// CHECK-NEXT:    arith.select
// CHECK-NEXT:    arith.cmpf ugt
// CHECK-NEXT:    arith.select
// CHECK-NOT:     arith.maximumf
func.func @others(%x: f32, %low: f32) -> (f32, f32) {
  %0 = arith.cmpf olt, %x, %low : f32
  %1 = arith.select %0, %low, %x : f32
  %2 = arith.cmpf ugt, %x, %low : f32
  %3 = arith.select %2, %x, %low : f32
  return %1, %3 : f32, f32
}
