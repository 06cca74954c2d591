// Columns that the rows of a strip share are gathered into tiles.
// RUN: gossamer-opt %s -p 'expose-storage,lower-amxcolumns,canonicalize,cse' | filecheck %s

// Behind the packed columns of x is one of zeros, for panels that are not full.
// CHECK-LABEL: func.func private @region_tile32(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?x64xbf16>, %{{[a-z0-9]*}}: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xbf16>,
// CHECK:         %[[SUMS:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<32x32xf32>
// CHECK:         %[[TILES:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<2x16x32xbf16>
// CHECK:         %[[PACKED:[a-z0-9_]*]] = memref.view %{{.*}} : memref<?xi8> to memref<65x32xbf16>
// CHECK:         vector.store %{{.*}}, %[[PACKED]][%c64, %c0]
// CHECK:         vector.store %{{.*}}, %[[PACKED]][%c64, %c16]

// Two columns of 32 tokens become a line of each tile. The weight is the left tile.
// CHECK:         scf.for %[[PANEL:[a-z0-9]*]] = %{{[a-z0-9]*}} to %{{[a-z0-9]*}} step %c1 iter_args(%[[S0:[a-z0-9]*]] = %{{[a-z0-9_]*}}, %[[S1:[a-z0-9]*]] = %{{[a-z0-9_]*}},
// CHECK:           scf.for %[[PAIR:[a-z0-9]*]] = %c0 to %c16 step %c1 {
// CHECK-COUNT-2:     memref.load %[[CRD]]
// CHECK:             vector.shuffle
// CHECK:             vector.store %{{.*}}, %[[TILES]][%c0, %[[PAIR]], %c0]
// CHECK:             vector.store %{{.*}}, %[[TILES]][%c1, %[[PAIR]], %c0]
// CHECK:           %[[X0:[a-z0-9]*]] = x86.amx.tile_load %[[TILES]][%c0, %c0, %c0]
// CHECK:           %[[X1:[a-z0-9]*]] = x86.amx.tile_load %[[TILES]][%c1, %c0, %c0]
// CHECK:           %[[W0:[a-z0-9]*]] = x86.amx.tile_load %[[VAL]]
// CHECK-NEXT:      x86.amx.tile_mulf %[[W0]], %[[X0]], %[[S0]]
// CHECK-NEXT:      x86.amx.tile_mulf %[[W0]], %[[X1]], %[[S1]]
// CHECK-COUNT-2:   x86.amx.tile_mulf
// CHECK-COUNT-4: x86.amx.tile_store %[[SUMS]]
// CHECK-LABEL: func.func private @region_tile16(
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<40x64xbf16, "panels(reduction=1, rows=32)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxcolumns", tile = [32]} : (tensor<?x64xbf16>, tensor<40x64xbf16, "panels(reduction=1, rows=32)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}
