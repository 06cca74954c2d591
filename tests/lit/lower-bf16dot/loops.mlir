// Blocks of bf16 by dot products of pairs.
// RUN: gossamer-opt %s -p 'expose-storage,lower-bf16dot,canonicalize,cse' | filecheck %s

// From 17 tokens on twelve of them have their sums in registers, two vectors each.
// CHECK-LABEL: func.func private @region_tile12(
// CHECK:         scf.for {{.*}} iter_args
// CHECK-COUNT-48:  x86.avx512.dot
// CHECK-NOT:       x86.avx512.dot
// CHECK:         scf.for %{{.*}} = %c0 to %c12 step %c1 {
// CHECK:           vector.maskedstore
// CHECK-LABEL: func.func private @region_tile8(
// CHECK-LABEL: func.func private @region_tile4(

// Two tokens: the two pairs of columns of a block have sums of their own, so that there are eight at once. 16 rows' pairs are
// loaded as they lie, a token's pair is read from x into all lanes.
// CHECK-LABEL: func.func private @region_tile2(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x64xbf16>, %{{[a-z0-9]*}}: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xbf16>,
// CHECK:         %[[SUMS:[a-z0-9_]*]]:8 = scf.for %[[P:[a-z0-9_]*]] = %{{[a-z0-9_]*}} to %{{[a-z0-9_]*}} step %c1 iter_args(%[[S0:[a-z0-9]*]] = %{{[a-z0-9_]*}}, %[[S1:[a-z0-9]*]] = %{{[a-z0-9_]*}}, %[[S2:[a-z0-9]*]] = %{{[a-z0-9_]*}},
// CHECK-NEXT:      memref.load %[[CRD]][%[[P]]]
// CHECK:           %[[K:[a-z0-9_]*]] = arith.muli %{{.*}}, %c4
// CHECK:           %[[W0:[a-z0-9_]*]] = vector.load %[[VAL]][%{{.*}}] : memref<?xbf16>, vector<32xbf16>
// CHECK-NEXT:      arith.addi
// CHECK-NEXT:      %[[W1:[a-z0-9_]*]] = vector.load %[[VAL]][%{{.*}}] : memref<?xbf16>, vector<32xbf16>
// CHECK:           vector.load %[[X]][%{{.*}}, %[[K]]] : memref<?x64xbf16>, vector<2xbf16>
// CHECK:           vector.broadcast %{{.*}} : i32 to vector<16xi32>
// CHECK-NEXT:      %[[PAIR:[a-z0-9_]*]] = vector.bitcast %{{.*}} : vector<16xi32> to vector<32xbf16>
// CHECK-NEXT:      x86.avx512.dot %[[S0]], %[[W0]], %[[PAIR]]
// CHECK-NEXT:      x86.avx512.dot %[[S1]], %[[W1]], %[[PAIR]]
// CHECK:           x86.avx512.dot %[[S2]], %[[W0]],
// CHECK-COUNT-5:   x86.avx512.dot
// CHECK:         arith.addf %[[SUMS]]#0, %[[SUMS]]#4
// CHECK-LABEL: func.func private @region_tile1(

// The widest function that has not too few tokens is called.
// CHECK-LABEL: func.func @region(
// CHECK:         arith.cmpi uge, %{{.*}}, %c17
// CHECK:           func.call @region_tile12
// CHECK:         arith.cmpi uge, %{{.*}}, %c8
// CHECK:           func.call @region_tile8
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<40x64xbf16, "vnni(reduction=1, rows=32, columns=4)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "bf16dot", tile = [96, 96]} : (tensor<?x64xbf16>, tensor<40x64xbf16, "vnni(reduction=1, rows=32, columns=4)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}
